"""Diff of pieces in CUDA memory by Triton kernels; records have the bits of the other kernels.

Tested in Triton's interpreter, on CPU memory (`TRITON_INTERPRET=1`). Two launches find all records: one counts the
changes of each tile of 1024 elements, one writes them where the counts say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash

from holdfast.store.data.digests import LEAST_BYTES
from holdfast.store.delta.records import (
    BLOCK,
    INTEGERS,
    WHOLE,
    Delta,
    ElementPiece,
    PackedDelta,
    blocks_of,
    changes_in,
    most_of,
    record_bytes,
)
from holdfast.store.digest_kernel import begin_digests

Tensors = Sequence[torch.Tensor]

TILE = 1024
"""Elements that one program compares; it divides `BLOCK`."""
_TRITON_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def count_changes(base, changed, elements, counts, integer: tl.constexpr, tile_elements: tl.constexpr):
    """The number of differing elements of each tile; `base` and `changed` hold the tiles' addresses."""
    tile = tl.program_id(0)
    lanes = tl.arange(0, tile_elements)
    inside = lanes < tl.load(elements + tile)
    before = tl.load(tl.load(base + tile).to(tl.pointer_type(integer)) + lanes, mask=inside, other=0)
    after = tl.load(tl.load(changed + tile).to(tl.pointer_type(integer)) + lanes, mask=inside, other=0)
    tl.store(counts + tile, tl.sum((before != after).to(tl.int32), axis=0))


@triton.jit
def pack_changes(base, changed, elements, starts, places, values, integer: tl.constexpr, tile_elements: tl.constexpr):
    """Write each tile's differing elements: places in the block to the addresses `places`, elements to `values`."""
    tile = tl.program_id(0)
    lanes = tl.arange(0, tile_elements)
    inside = lanes < tl.load(elements + tile)
    before = tl.load(tl.load(base + tile).to(tl.pointer_type(integer)) + lanes, mask=inside, other=0)
    after = tl.load(tl.load(changed + tile).to(tl.pointer_type(integer)) + lanes, mask=inside, other=0)
    differ = before != after
    at = tl.cumsum(differ.to(tl.int32), axis=0) - 1
    place = (tl.load(starts + tile) + lanes).to(tl.uint16)
    tl.store(tl.load(places + tile).to(tl.pointer_type(tl.uint16)) + at, place, mask=differ)
    tl.store(tl.load(values + tile).to(tl.pointer_type(integer)) + at, after, mask=differ)


def diff(base: Tensors, changed: Tensors, pieces: Sequence[ElementPiece]) -> PackedDelta:
    """The delta between the bytes of pieces: flat uint8 tensors on one device, each aligned to its elements."""
    device = base[0].device if base else torch.device("cpu")
    sizes = np.zeros(len(pieces), np.uint32)
    groups = {
        size: _Tiles(base, changed, pieces, size) for size in {piece.itemsize for piece in pieces if piece.nbytes}
    }
    for itemsize, tiles in groups.items():
        counts = torch.empty(len(tiles.piece), dtype=torch.int32, device=device)
        tables = (_table(each, device) for each in (tiles.base, tiles.changed, tiles.elements))
        count_changes[(len(counts),)](*tables, counts, integer=_TRITON_INTEGERS[itemsize], tile_elements=TILE)
        tiles.counts = counts.cpu().numpy().astype(np.int64)
        for at, total in enumerate(np.bincount(tiles.piece, tiles.counts, len(pieces)).astype(np.int64).tolist()):
            if total:
                size = record_bytes(pieces[at], total)
                sizes[at] = size if size <= most_of(pieces[at]) else WHOLE
    kept = np.where(sizes == WHOLE, 0, sizes).astype(np.int64)
    at_byte = np.cumsum(kept) - kept
    records = torch.zeros(int(kept.sum()), dtype=torch.uint8, device=device)
    for itemsize, tiles in groups.items():
        tiles.keep(kept > 0)
        if not len(tiles.piece):
            continue
        places, values = tiles.write_heads(records, at_byte, pieces)
        columns = (tiles.base, tiles.changed, tiles.elements, tiles.start, places, values)
        tables = (_table(each, device) for each in columns)
        pack_changes[(len(tiles.piece),)](*tables, integer=_TRITON_INTEGERS[itemsize], tile_elements=TILE)
    return PackedDelta(tuple(pieces), sizes, (records,) if records.nbytes else ())


Numbers = npt.NDArray[np.int64]


class _Tiles:
    """The tiles of all pieces of one element size: columns with a number for each."""

    def __init__(self, base: Tensors, changed: Tensors, pieces: Sequence[ElementPiece], itemsize: int) -> None:
        lengths = [piece.nbytes // itemsize if piece.itemsize == itemsize else 0 for piece in pieces]
        count = np.array([-(-length // TILE) for length in lengths], np.int64)
        self.itemsize = itemsize
        self.piece: Numbers = np.repeat(np.arange(len(pieces)), count)
        first = (np.arange(len(self.piece)) - np.repeat(np.cumsum(count) - count, count)) * TILE
        self.block: Numbers = first // BLOCK
        self.start: Numbers = first % BLOCK
        self.elements: Numbers = np.minimum(np.array(lengths, np.int64)[self.piece] - first, TILE)
        self.base: Numbers = np.array([each.data_ptr() for each in base], np.int64)[self.piece] + first * itemsize
        self.changed: Numbers = np.array([each.data_ptr() for each in changed], np.int64)[self.piece] + first * itemsize
        self.counts: Numbers = np.zeros(len(self.piece), np.int64)

    def keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Leave out the tiles of the pieces that are not wanted."""
        chosen = wanted[self.piece]
        for name in ("piece", "block", "start", "elements", "base", "changed", "counts"):
            setattr(self, name, getattr(self, name)[chosen])

    def write_heads(
        self, records: torch.Tensor, at_byte: Numbers, pieces: Sequence[ElementPiece]
    ) -> tuple[Numbers, Numbers]:
        """Write the number of changes of each block; returns the addresses of each tile's places and elements."""
        blocks = np.array([blocks_of(piece.nbytes // piece.itemsize) for piece in pieces], np.int64)
        totals = np.bincount(self.piece, self.counts, len(pieces)).astype(np.int64)
        word = at_byte[self.piece] // 4 + self.block
        words, which = np.unique(word, return_inverse=True)
        counts = np.bincount(which, self.counts, len(words)).astype(np.int32)
        records.view(torch.int32)[_table(words, records.device)] = torch.from_numpy(counts).to(records.device)
        before = np.cumsum(self.counts) - self.counts
        before -= (np.cumsum(totals) - totals)[self.piece]
        places = records.data_ptr() + at_byte[self.piece] + _to_eight(4 * blocks)[self.piece]
        values = places + _to_eight(2 * totals)[self.piece] + before * self.itemsize
        return places + 2 * before, values


def _to_eight(nbytes: Numbers) -> Numbers:
    return (nbytes + 7) & ~7


def _table(column: Numbers, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)


def patch(base: Tensors, into: Tensors, delta: Delta) -> list[int]:
    """Make each piece of `into` (which may be `base`) that is not `WHOLE`; returns the checksums of those.

    Raises `CorruptData` for a record that cannot be that of its piece; pieces before it are then done.
    """
    for before, after, record, piece in zip(base, into, delta.records, delta.pieces, strict=True):
        if record is None:
            continue
        changes = changes_in(record, piece) if record.nbytes else None
        if after.data_ptr() != before.data_ptr():
            after.copy_(before)
        if changes is not None:
            where, values = (each.to(after.device) for each in changes)
            after.view(INTEGERS[piece.itemsize])[where] = values
    return checksums([piece for piece, record in zip(into, delta.records, strict=True) if record is not None])


def checksums(data: Tensors) -> list[int]:
    """xxh3 (64 bits) of each piece."""
    found: list[int] = [0] * len(data)
    large = [at for at, piece in enumerate(data) if piece.nbytes >= LEAST_BYTES and piece.data_ptr() % 8 == 0]
    for at in set(range(len(data))) - set(large):
        found[at] = xxhash.xxh3_64_intdigest(data[at].cpu().numpy().data)
    if large:
        places = np.array([(data[at].data_ptr(), data[at].nbytes) for at in large], np.uint64)
        begun = begin_digests(places[:, 0], places[:, 1], data[large[0]].device)
        if data[large[0]].is_cuda:
            torch.cuda.current_stream(data[large[0]].device).synchronize()
        for at, digest in zip(large, begun().tolist(), strict=True):
            found[at] = digest
    return found
