"""What the directory knows of a value: its kind, its shapes, and where its bytes lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch

from holdfast.comms.errors import CorruptData
from holdfast.ft.state.boxes import Box, shape_of, whole

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


PIECE_BYTES = 2 << 20
"""The most bytes of a piece: few enough to verify it while it is in the cache."""


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all records."""


class Location(Record, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in the store's memory: the number of a chunk, and a byte in it."""

    chunk: int
    offset: int


class StoredBlock(Record, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A contiguous tensor: its bytes, if they are few, or where they lie. `dtype` is torch's name of it.

    `sums` are the checksums (xxh3, 64 bits) of the pieces of `PIECE_BYTES` of what lies elsewhere.
    """

    dtype: str
    shape: tuple[int, ...]
    inline: bytes | None = None
    at: Location | None = None
    sums: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Piece(Record, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor, and its elements."""

    box: Box
    block: StoredBlock


class WholeTensor(Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    """A tensor that one process put whole."""

    block: StoredBlock


class TensorShard(Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag="s"):
    """The shard of a DTensor at `coordinates` of a mesh; more than one piece where placements are strided."""

    coordinates: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class StoredObject(Record, frozen=True, array_like=True, forbid_unknown_fields=True, tag="o"):
    """An object that is no tensor: its description as msgpack, and the tensors in it."""

    description: StoredBlock
    tensors: tuple[StoredBlock, ...]


Content = WholeTensor | TensorShard | StoredObject


def blocks_of(content: Content) -> Iterator[StoredBlock]:
    """All blocks of a content."""
    match content:
        case WholeTensor(block):
            yield block
        case TensorShard():
            yield from (piece.block for piece in content.pieces)
        case StoredObject():
            yield content.description
            yield from content.tensors


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in records."""
    return str(dtype).removeprefix("torch.")


def check_content(content: Content) -> None:
    """Raise `CorruptData` for a content that no client can have made."""
    for block in blocks_of(content):
        if block.dtype not in _DTYPES or any(size < 0 for size in block.shape):
            raise CorruptData(f"a block of {block.dtype} {list(block.shape)}")
        if (block.inline is None) == (block.at is None):
            raise CorruptData("a block has its bytes in one place")
        if block.inline is not None and len(block.inline) != block.nbytes:
            raise CorruptData(f"a block of {block.nbytes} bytes came with {len(block.inline)}")
        if len(block.sums) != (0 if block.at is None else -(-block.nbytes // PIECE_BYTES)):
            raise CorruptData(f"a block of {block.nbytes} bytes came with {len(block.sums)} checksums")
    if isinstance(content, StoredObject) and content.description.dtype != "uint8":
        raise CorruptData(f"the description of an object is bytes, not {content.description.dtype}")
    if isinstance(content, TensorShard):
        _check_shard(content)


def _check_shard(shard: TensorShard) -> None:
    place, sizes = shard.coordinates, shard.mesh_shape
    if len(place) != len(sizes) or not all(0 <= each < size for each, size in zip(place, sizes, strict=True)):
        raise CorruptData(f"a shard at {place} of a mesh of {sizes}")
    if len({piece.block.dtype for piece in shard.pieces}) > 1:
        raise CorruptData("a shard with pieces of several dtypes")
    for piece in shard.pieces:
        limits = whole(shard.global_shape)
        inside = len(piece.box) == len(limits) and all(
            0 <= low <= high <= most for (low, high), (_, most) in zip(piece.box, limits, strict=True)
        )
        if not inside or shape_of(piece.box) != piece.block.shape:
            raise CorruptData(f"a piece {piece.box} of {piece.block.shape} in a tensor of {shard.global_shape}")
