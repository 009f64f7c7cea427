"""Bit-exact differences between two versions of a part: their format, and compiled diff and patch of pieces.

A delta has a record for each piece of a part: its elements that differ from the base. A record has the number of
changes in each block of 65536 elements (32 bits each), the places of all changes within their blocks (16 bits each,
ascending), and the new elements; each of the three is filled up with zeros to a multiple of 8 bytes. Numbers are
little-endian. Elements are compared by their bits, so -0.0 differs from 0.0, and a NaN from a NaN with other bits.
There is one record for two given pieces.

A delta is a header (`_HEADER`), the size of each record (32 bits each), zeros up to a multiple of 8 bytes, and the
records. Size 0 stands for a piece without changes, `WHOLE` for one with a record of more than half of its size: such a
piece is not in the delta, and is read from the part itself.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.comms import _native
from holdfast.comms.errors import CorruptData
from holdfast.store.data.digests import LEAST_BYTES
from holdfast.store.data.manifest import RegionLayout

BLOCK = 65536
"""Elements of a block: a place in it takes 16 bits."""
WHOLE = 0xFFFFFFFF
"""The size that stands for a piece that has to be read whole."""
MOST_PIECE_BYTES = 1 << 30
_MAGIC = b"hfdelta1"
_HEADER = struct.Struct("<8s16s16sQ")
"""Magic, digests of the base and of the new part, number of pieces."""

Sizes = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ElementPiece:
    """A piece of a part: `nbytes` bytes from `offset` on, of elements of `itemsize` bytes (1, 2, 4 or 8)."""

    offset: int
    nbytes: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.itemsize not in (1, 2, 4, 8) or self.nbytes % self.itemsize or not 0 <= self.nbytes <= MOST_PIECE_BYTES:
            raise ValueError(f"{self} is not up to 1 GiB of elements of 1, 2, 4 or 8 bytes")

    def of(self, region: torch.Tensor) -> torch.Tensor:
        """The bytes of this piece in the memory of a part."""
        if not 0 <= self.offset <= region.nbytes - self.nbytes:
            raise ValueError(f"{self} is outside of a region of {region.nbytes} bytes")
        return region[self.offset : self.offset + self.nbytes]


@functools.lru_cache(maxsize=16)
def element_pieces(layout: RegionLayout) -> tuple[ElementPiece, ...]:
    """The pieces of a layout, with the size of their elements: 1 where tensors of different sizes share a piece."""
    found = []
    for piece in layout.pieces:
        sizes = {min(layout.entries[entry].torch_dtype.itemsize, 8) for entry in piece.entries}
        itemsize = sizes.pop() if len(sizes) == 1 else 1
        found.append(ElementPiece(piece.offset, piece.nbytes, 1 if piece.nbytes % itemsize else itemsize))
    return tuple(found)


def to_eight(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def most_of(piece: ElementPiece) -> int:
    """The limit of a piece's record, in bytes: a larger one is left out, and the piece is `WHOLE`."""
    return piece.nbytes // 2


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """The records of the pieces of a part, in order: `sizes` of them, and the records in adjacent `chunks`."""

    pieces: tuple[ElementPiece, ...]
    sizes: Sizes
    chunks: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The size of the encoded delta."""
        return _records_at(len(self.pieces)) + sum(chunk.nbytes for chunk in self.chunks)

    @property
    def whole_bytes(self) -> int:
        """The bytes of the pieces that have to be read whole."""
        return sum(self.pieces[at].nbytes for at in np.flatnonzero(self.sizes == WHOLE))

    def among(self, pieces: Sequence[ElementPiece], numbers: Sequence[int] | npt.NDArray[np.intp]) -> PackedDelta:
        """The delta of more pieces, of which those with these `numbers` are ours and the others do not change."""
        sizes = np.zeros(len(pieces), np.uint32)
        sizes[np.asarray(numbers, np.intp)] = self.sizes
        return PackedDelta(tuple(pieces), sizes, self.chunks)

    def write(self, into: torch.Tensor, base_digest: bytes, new_digest: bytes) -> None:
        """Encode the delta between the parts with these digests into a flat uint8 tensor of `nbytes` bytes."""
        if into.nbytes != self.nbytes:
            raise ValueError(f"{into.nbytes} bytes for a delta of {self.nbytes}")
        at = _records_at(len(self.pieces))
        head = _HEADER.pack(_MAGIC, base_digest, new_digest, len(self.pieces)) + self.sizes.astype("<u4").tobytes()
        into[:at].numpy()[:] = np.frombuffer(head.ljust(at, b"\0"), np.uint8)
        for chunk in self.chunks:
            into[at : at + chunk.nbytes].numpy()[:] = chunk.numpy()
            at += chunk.nbytes


@dataclass(frozen=True, slots=True)
class Delta:
    """A decoded delta. `records` has one entry a piece: its record, None for a `WHOLE` piece; empty without changes."""

    pieces: tuple[ElementPiece, ...]
    records: tuple[torch.Tensor | None, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """The positions of the pieces that have to be read whole."""
        return tuple(at for at, record in enumerate(self.records) if record is None)

    def only(self, numbers: Sequence[int]) -> Delta:
        """The delta of the pieces with these numbers."""
        return Delta(tuple(self.pieces[at] for at in numbers), tuple(self.records[at] for at in numbers))

    @staticmethod
    def decode(data: torch.Tensor, base_digest: bytes, new_digest: bytes, pieces: Sequence[ElementPiece]) -> Delta:
        """The delta in a flat uint8 tensor on the CPU, which must not change while the delta is in use.

        Raises `CorruptData` unless it is one between parts with these digests and pieces, of the right size. The
        records themselves are checked when they are applied.
        """
        first = _records_at(len(pieces))
        if data.nbytes < first:
            raise CorruptData(f"{data.nbytes} bytes cannot be a delta of {len(pieces)} pieces")
        head = data[:first].numpy().tobytes()
        magic, base, new, count = _HEADER.unpack_from(head)
        if magic != _MAGIC or count != len(pieces) or any(head[_HEADER.size + 4 * count :]):
            raise CorruptData(f"not a delta of {len(pieces)} pieces")
        if (base, new) != (base_digest, new_digest):
            raise CorruptData(
                f"a delta from {base.hex()} to {new.hex()}, not {base_digest.hex()} to {new_digest.hex()}"
            )
        sizes = np.frombuffer(head, "<u4", count, _HEADER.size).tolist()
        records: list[torch.Tensor | None] = []
        at = first
        for piece, size in zip(pieces, sizes, strict=True):
            if size == WHOLE:
                records.append(None)
                continue
            if size % 8 or size > most_of(piece) or at + size > data.nbytes:
                raise CorruptData(f"a delta with a record of {size} bytes at {at}, of {data.nbytes}, for {piece}")
            records.append(data[at : at + size])
            at += size
        if at != data.nbytes:
            raise CorruptData(f"a delta with {data.nbytes - at} bytes after its last record")
        return Delta(tuple(pieces), tuple(records))


def _records_at(pieces: int) -> int:
    return to_eight(_HEADER.size + 4 * pieces)


CHUNK_BYTES = 4 << 20
"""The least size of the memory for records that a thread asks for at once."""
LEAST_OF_THREAD = 4 << 20
"""Bytes for which another thread pays."""
_SLACK = 2 * BLOCK + 64
"""Bytes that the compiled code may write behind a record's limit before it gives the record up (element_diff.c)."""

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")


def diff(
    base: torch.Tensor, new: torch.Tensor, pieces: Sequence[ElementPiece], *, portable: bool = False
) -> PackedDelta:
    """The elements of `new` that differ from those of `base` by their bits; `portable` uses no vector instructions.

    Both are flat uint8 tensors of the host; bytes outside of `pieces` are not looked at. Pieces that changed too much
    are left to be read whole.
    """
    table = np.empty((len(pieces), 4), np.uint64)
    table[:, 0] = [piece.of(base).data_ptr() for piece in pieces]
    table[:, 1] = [piece.of(new).data_ptr() for piece in pieces]
    table[:, 2] = [each.nbytes for each in pieces]
    table[:, 3] = [each.itemsize for each in pieces]
    sizes = np.zeros(len(pieces), np.uint32)
    limits = [most_of(piece) for piece in pieces]

    def run(start: int, end: int) -> list[torch.Tensor]:
        chunks: list[torch.Tensor] = []
        while start < end:
            room = max(CHUNK_BYTES, limits[start] + _SLACK)
            records = torch.empty(room, dtype=torch.uint8, device="cpu")
            rows, at = table[start:end], sizes[start:end]
            done = _native.diff_pieces(
                rows.ctypes.data, end - start, records.data_ptr(), room, at.ctypes.data, portable
            )
            chunks.append(records[: _sum(at[:done])])
            start += done
        return chunks

    chunks = [chunk for chunks in _in_threads(run, pieces) for chunk in chunks if chunk.nbytes]
    return PackedDelta(tuple(pieces), sizes, tuple(chunks))


def patch(base: Tensors, into: Tensors, delta: Delta, checksums: Sequence[int]) -> tuple[int, ...]:
    """Make the pieces of the new version in `into`; return the positions of those that are to be read whole.

    `base` and `into` are the bytes of the pieces, flat uint8 tensors of the host; each of `into` is that of `base`
    itself, or beside it. All pieces but the returned ones have their `checksums`. The returned ones are `WHOLE` in the
    delta, or came out with another checksum: their base was not the delta's base, or the delta is damaged.

    Raises `CorruptData` for a record that cannot be that of its piece; pieces are then half done.
    """
    for piece, before, after in zip(delta.pieces, base, into, strict=True):
        if before.nbytes != piece.nbytes or after.nbytes != piece.nbytes:
            raise ValueError(f"{piece} lies in {before.nbytes} bytes, and goes to {after.nbytes}")
    chosen = [(at, record) for at, record in enumerate(delta.records) if record is not None]
    pieces = [delta.pieces[at] for at, _ in chosen]
    table = np.empty((len(chosen), 6), np.uint64)
    table[:, 0] = [base[at].data_ptr() for at, _ in chosen]
    table[:, 1] = [into[at].data_ptr() for at, _ in chosen]
    table[:, 2] = [piece.nbytes for piece in pieces]
    table[:, 3] = [piece.itemsize for piece in pieces]
    table[:, 4] = [record.data_ptr() for _, record in chosen]
    table[:, 5] = [record.nbytes for _, record in chosen]

    sums = np.zeros(len(chosen), np.uint64)

    def run(start: int, end: int) -> int:
        rows, found = table[start:end], sums[start:end]
        return _native.patch_pieces(rows.ctypes.data, end - start, found.ctypes.data) - (end - start)

    if any(_in_threads(run, pieces)):
        raise CorruptData("a delta with a record that cannot be that of its piece")
    for number, (at, _) in enumerate(chosen):
        if pieces[number].nbytes < LEAST_BYTES:
            sums[number] = xxhash.xxh3_64_intdigest(into[at].numpy().data)
    right = {at for (at, _), checksum in zip(chosen, sums.tolist(), strict=True) if checksum == checksums[at]}
    return tuple(at for at in range(len(delta.pieces)) if at not in right)


def _sum(sizes: Sizes) -> int:
    return int(sizes[sizes != WHOLE].sum(dtype=np.int64))


def _in_threads(run: Callable[[int, int], T], pieces: Sequence[ElementPiece]) -> list[T]:
    """The results of `run` for adjacent ranges of pieces of about equal size, in order."""
    ends: npt.NDArray[np.int64] = np.cumsum([piece.nbytes for piece in pieces], dtype=np.int64)
    if not len(ends):
        return []
    threads = int(min(torch.get_num_threads(), max(1, ends[-1] // LEAST_OF_THREAD)))
    cuts = [0, *np.searchsorted(ends, [ends[-1] * i // threads for i in range(1, threads)]).tolist(), len(pieces)]
    if threads == 1:
        return [run(0, len(pieces))]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, cuts[:-1], cuts[1:]))
