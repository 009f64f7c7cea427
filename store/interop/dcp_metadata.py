"""Reads the metadata of a torch.distributed.checkpoint directory without running code from it.

It is a pickle. Only the types that DCP itself writes there are built from it, and all that they hold is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.comms.errors import CorruptData
from holdfast.ft.state.boxes import Box, cover, whole
from holdfast.store.errors import CopyFailed
from holdfast.store.interop.new_directory import disk_errors

Refused = pickle.UnpicklingError
"""The error of `torch.load` for a value that is damaged, or of a type that it does not take for safe."""
NAME = ".metadata"
MOST_DIMENSIONS = 64
_DCP = "torch.distributed.checkpoint"
_DCP_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in _DCP_METADATA),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class Item(msgspec.Struct, frozen=True):
    """Where a value or a piece of a tensor is: a range of a file."""

    file: str
    offset: int
    length: int


class DcpPiece(msgspec.Struct, frozen=True):
    """A box of a tensor, and where it is."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint; its pieces cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[DcpPiece, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a directory.

    Tensors and other values by flat name, and the paths of the names in the state dict.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]


class _Paths(msgspec.Struct):
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(directory: Path) -> Checkpoint:
    """The metadata of a checkpoint. Raises `CorruptData` with all that is wrong with it, `CopyFailed`."""
    path = directory / NAME
    with disk_errors(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CopyFailed(directory, f"it has no {NAME} of torch.distributed.checkpoint") from None
    try:
        return _checked(_MetadataUnpickler(io.BytesIO(data)).load())
    except CorruptData as error:
        raise CorruptData(f"{path}: {error}") from error
    except Exception as error:  # a pickle that was tampered with can fail in any way
        raise CorruptData(f"{path} is not the metadata of a checkpoint: {error}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise CorruptData(f"it asks for {module}.{name}, which DCP does not write there")


def _checked(found: object) -> Checkpoint:
    if not isinstance(found, Metadata):
        raise CorruptData("it is not the metadata of a checkpoint")
    faults: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Item] = {}
    for name, known in found.state_dict_metadata.items():
        if not isinstance(name, str):
            raise CorruptData(f"{name!r} is no name")
        try:
            if isinstance(known, TensorStorageMetadata):
                tensors[name] = _tensor(name, known, found.storage_data)
            elif isinstance(known, BytesStorageMetadata):
                values[name] = _item(name, None, found.storage_data)
            else:
                raise CorruptData(f"{name!r} is neither a tensor nor a value")
        except CorruptData as error:
            faults.append(str(error))
    if faults:
        raise CorruptData("; ".join(faults))
    planner_data = found.planner_data if isinstance(found.planner_data, dict) else {}
    paths = msgspec.convert({"paths": planner_data}, _Paths).paths
    return Checkpoint(tensors, values, paths)


def _tensor(name: str, known: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> StoredTensor:
    dtype, shape = known.properties.dtype, tuple(known.size)
    if not isinstance(dtype, torch.dtype) or len(shape) > MOST_DIMENSIONS or not all(map(_is_size, shape)):
        raise CorruptData(f"{name!r} has no possible dtype and shape")
    pieces = tuple(_pieces(name, known, places))
    if _is_empty(shape):
        return StoredTensor(dtype, shape, pieces[:1])
    if lacking := cover(whole(shape), [piece.box for piece in pieces])[1]:
        raise CorruptData(f"{name!r} lacks {lacking[0]} of {shape}")
    return StoredTensor(dtype, shape, pieces)


def _pieces(name: str, known: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> Iterator[DcpPiece]:
    for chunk in known.chunks:
        if len(chunk.offsets) != len(known.size) or len(chunk.sizes) != len(known.size):
            raise CorruptData(f"{name!r} has a piece of other dimensions")
        box = tuple((start, start + length) for start, length in zip(chunk.offsets, chunk.sizes, strict=True))
        if not all(0 <= low <= high <= size for (low, high), size in zip(box, known.size, strict=True)):
            raise CorruptData(f"{name!r} has a piece {box} outside of {tuple(known.size)}")
        yield DcpPiece(box, _item(name, chunk.offsets, places))


def _item(name: str, offsets: Any, places: Mapping[MetadataIndex, Any]) -> Item:
    info = places.get(MetadataIndex(name, offsets))
    if info is None:
        raise CorruptData(f"there is no data for {name!r}")
    if getattr(info, "transform_descriptors", None):
        raise CorruptData(f"{name!r} was saved through an extension, which cannot be read here")
    item = msgspec.convert({"file": info.relative_path, "offset": info.offset, "length": info.length}, Item)
    if Path(item.file).name != item.file or item.offset < 0 or item.length < 0:
        raise CorruptData(f"{name!r} lies outside of the directory, in {item.file}")
    return item


def _is_size(length: object) -> bool:
    return isinstance(length, int) and 0 <= length < 1 << 62


def _is_empty(shape: tuple[int, ...]) -> bool:
    return 0 in shape
