"""Maps the tensors in the files of torch.distributed.checkpoint, and reads the values there, without running code."""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch

from holdfast.comms.errors import CorruptData, HoldfastError, Unsupported
from holdfast.ft.state.boxes import shape_of
from holdfast.store.interop.dcp_metadata import Checkpoint, DcpPiece, Item, Refused
from holdfast.store.interop.new_directory import disk_errors

_LOCAL_HEADER = struct.Struct("<26xHH")
"""The header of a zip entry, up to the lengths of its name and of what stands between that and its data."""


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
        data = self._bytes(piece.item)
        try:
            like = torch.load(cast("IO[bytes]", _MappedFile(data)), map_location="meta", weights_only=True)
            stored = _storage(data)
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


def _storage(data: memoryview) -> memoryview:
    """The bytes of the storage in what `torch.save` wrote for a tensor; none for an empty one."""
    with zipfile.ZipFile(cast("IO[bytes]", _MappedFile(data))) as archive:
        entries = [each for each in archive.infolist() if each.filename.endswith("/data/0")]
    if not entries:
        return data[:0]
    (entry,) = entries
    header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
    start = entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    found = data[start : start + entry.file_size]
    if entry.compress_type != zipfile.ZIP_STORED or len(found) < entry.file_size:
        raise CorruptData("its storage is compressed, or cut off")
    return found


class _MappedFile(io.RawIOBase):
    """A file over mapped bytes, of which nothing is copied but what is read."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
