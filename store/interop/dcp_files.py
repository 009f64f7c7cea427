"""Maps the tensors in the files of torch.distributed.checkpoint, and reads the values there, without running code."""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _create_file_view

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.ft.state.boxes import shape_of
from holdfast.store.interop.dcp_metadata import Checkpoint, DcpPiece, Item, Refused
from holdfast.store.interop.new_directory import disk_errors

_STORAGE = "data/0"
"""What `torch.save` calls the elements of a tensor in its archive. It never compresses them."""


class DcpFiles:
    """The tensors and values in the files of a checkpoint. Mapped tensors last as long as they are used."""

    def __init__(self, directory: Path, checkpoint: Checkpoint) -> None:
        self._directory, self._checkpoint = directory, checkpoint
        self._mappings: dict[str, mmap.mmap] = {}

    def faults(self) -> list[str]:
        """The files that are missing or too short."""
        items = [piece.item for tensor in self._checkpoint.tensors.values() for piece in tensor.pieces]
        found: dict[str, None] = {}
        for item in (*items, *self._checkpoint.values.values()):
            try:
                self._bytes(item)
            except HoldfastError as error:
                found[str(error)] = None
        return list(found)

    def value(self, name: str) -> Any:
        """A value that is not a tensor. Raises `Unsupported` for one of a type that torch does not take for safe."""
        data = bytes(self._bytes(self._checkpoint.values[name]))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Refused as error:
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"{name!r} in {self._directory}: {reason}", "leave it out of the checkpoint") from error
        except Exception as error:
            raise CorruptData(f"{name!r} in {self._directory} is damaged: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor: a mapping of its file, if it is there in one piece."""
        known = self._checkpoint.tensors[name]
        if len(known.pieces) == 1 and shape_of(known.pieces[0].box) == known.shape:
            return self._piece(name, known.pieces[0], known.dtype)
        found = torch.empty(known.shape, dtype=known.dtype, device="cpu")
        for piece in known.pieces:
            target = found[tuple(slice(*each) for each in piece.box)]
            target.copy_(self._piece(name, piece, known.dtype))
        return found

    def _piece(self, name: str, piece: DcpPiece, dtype: torch.dtype) -> torch.Tensor:
        data, path = self._bytes(piece.item), self._directory / piece.item.file
        try:
            with path.open("rb", buffering=0) as file:
                saved = cast("IO[bytes]", _create_file_view(file, piece.item.offset, piece.item.length))
                like = torch.load(saved, map_location="meta", weights_only=True)
                saved.seek(0)
                reader: Any = torch._C.PyTorchFileReader(saved)
                stored = data[reader.get_record_offset(_STORAGE) :] if reader.has_record(_STORAGE) else data[:0]
        except Exception as error:
            raise CorruptData(f"{name!r} in {self._directory} is damaged: {error}") from error
        if not isinstance(like, torch.Tensor) or like.dtype != dtype or tuple(like.shape) != shape_of(piece.box):
            raise CorruptData(f"{name!r} in {self._directory} is not what its metadata says")
        if not like.numel():
            return torch.empty(like.shape, dtype=dtype, device="cpu")
        last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        if stored.nbytes < (like.storage_offset() + last + 1) * dtype.itemsize:
            raise CorruptData(f"{name!r} in {self._directory} has too few bytes")
        flat = torch.frombuffer(stored, dtype=torch.uint8)[: stored.nbytes // dtype.itemsize * dtype.itemsize]
        return flat.view(dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _bytes(self, item: Item) -> memoryview:
        """The bytes of an item, mapped. What is written into them stays in this process."""
        path = self._directory / item.file
        if item.file not in self._mappings:
            with disk_errors(path), path.open("rb") as file:
                try:
                    self._mappings[item.file] = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
                except ValueError as error:
                    raise CorruptData(f"{path} is empty") from error
        found = memoryview(self._mappings[item.file])[item.offset : item.offset + item.length]
        if len(found) < item.length:
            raise CorruptData(f"{path} is cut off")
        return found
