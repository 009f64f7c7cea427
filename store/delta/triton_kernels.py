"""Diff and checksums of pieces in CUDA memory by Triton kernels; records have the bits of the other kernels.

Tested in Triton's interpreter, on CPU memory (`TRITON_INTERPRET=1`). Two launches find all records: one counts the
changes of each tile of 1024 elements, one writes them where the counts say. XXH3 is computed by one program a piece, of
one warp: its lanes are scrambled every 1024 bytes, in sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
import xxhash

from holdfast.store.data.digests import LEAST_BYTES, Words
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


@triton.jit
def digest_lanes(table, secret, start, found, copies: tl.constexpr, ahead: tl.constexpr):
    """XXH3's eight lanes of each piece before its last 64 bytes, and those, as 16 words of `found` a piece.

    `table` has the address and the size of each piece, and where it is copied to. A block of 1024 bytes is a sum, so
    `ahead` of them are loaded at once; only the scramble after each goes in sequence.
    """
    piece = tl.program_id(0)
    lane = tl.arange(0, 8)
    row = tl.arange(0, 16)
    byte = tl.arange(0, 64)
    block = tl.arange(0, ahead)
    data = tl.load(table + piece * 3).to(tl.pointer_type(tl.uint64))
    nbytes = tl.load(table + piece * 3 + 1)
    target = tl.load(table + piece * 3 + 2).to(tl.pointer_type(tl.uint64))
    last = tl.load(data.to(tl.pointer_type(tl.uint8)) + (nbytes - 64) + byte)
    tl.store((found + piece * 16 + 8).to(tl.pointer_type(tl.uint8)) + byte, last)
    if copies:
        tl.store(target.to(tl.pointer_type(tl.uint8)) + (nbytes - 64) + byte, last)
    left = (nbytes - 1) // 64
    word = lane[:, None] + row[None, :] * 8
    words = lane[:, None, None] + block[None, :, None] * 128 + row[None, None, :] * 8  # a thread sums rows
    keys = tl.load(secret + lane[:, None] + row[None, :])
    scramble = tl.load(secret + 16 + lane)
    sums = tl.load(start + lane)
    while left >= 16 * ahead:
        value = tl.load(data + words)
        if copies:
            tl.store(target + words, value)
        key = value ^ keys[:, None, :]
        added = tl.sum((key & 0xFFFFFFFF) * (key >> 32) + tl.load(data + (words ^ 1)), axis=2)
        for number in tl.static_range(ahead):
            sums += tl.sum(added * (block == number).to(tl.uint64)[None, :], axis=1)
            sums = (sums ^ (sums >> 47) ^ scramble) * 0x9E3779B1
        data += 128 * ahead
        target += 128 * ahead
        left -= 16 * ahead
    while left > 0:
        inside = (lane < 8)[:, None] & (row < left)[None, :]
        value = tl.load(data + word, mask=inside, other=0)
        if copies:
            tl.store(target + word, value, mask=inside)
        key = value ^ keys
        product = (key & 0xFFFFFFFF) * (key >> 32) + tl.load(data + (word ^ 1), mask=inside, other=0)
        sums += tl.sum(tl.where(inside, product, 0).to(tl.uint64), axis=1)
        if left >= 16:
            sums = (sums ^ (sums >> 47) ^ scramble) * 0x9E3779B1
        data += 128
        target += 128
        left -= 16
    tl.store(found + piece * 16 + lane, sums)


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


# -- checksums

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
BLOCKS_AHEAD = 8
"""Blocks of 1024 bytes that a program loads at once: a processor has few programs to hide the latency of memory."""


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


def begin_digests(
    addresses: Words, sizes: Words, device: torch.device, targets: Words | None = None
) -> Callable[[], Words]:
    """Begin to compute xxh3 (64 bits) of pieces: what is returned gives them once the current stream is synchronized.

    The pieces have at least `LEAST_BYTES`, and lie at addresses of the device that are multiples of 8. They are copied
    to such addresses `targets`, if these are given.
    """
    columns = addresses, sizes, addresses if targets is None else targets
    table = torch.from_numpy(np.stack(columns, axis=1).astype(np.uint64).view(np.int64))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    lanes = torch.empty(16 * len(sizes), dtype=torch.uint64, device=device)
    secret, start = _constants(device)
    digest_lanes[(len(sizes),)](
        table, secret, start, lanes, copies=targets is not None, ahead=BLOCKS_AHEAD, num_warps=1
    )
    found = lanes.to("cpu", non_blocking=True)

    def result() -> Words:
        words: Words = found.numpy().reshape(-1, 16)
        return _finish(words[:, :8], words[:, 8:], sizes)

    return result


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The secret, and the lanes at the start."""
    data = _SECRET, np.array(_START, np.uint64).tobytes()
    secret, start = (torch.frombuffer(bytearray(each), dtype=torch.uint64).to(device) for each in data)
    return secret, start


def _finish(lanes: Words, ends: Words, sizes: Words) -> Words:
    """The checksums, from the lanes of each piece before its last 64 bytes and those bytes."""
    lanes = lanes + ends[:, [1, 0, 3, 2, 5, 4, 7, 6]]
    key = ends ^ _secret_at(121, 8)
    lanes += (key & _LOW) * (key >> _HALF)
    total: Words = sizes.astype(np.uint64) * np.uint64(0x9E3779B185EBCA87)
    mixed = lanes ^ _secret_at(11, 8)
    for pair in range(0, 8, 2):
        left, right = mixed[:, pair], mixed[:, pair + 1]
        total += left * right ^ _high_product(left, right)
    total = (total ^ total >> np.uint64(37)) * np.uint64(0x165667919E3779F9)
    total ^= total >> _HALF
    return total


def _high_product(left: Words, right: Words) -> Words:
    """The upper 64 bits of products."""
    low, cross = (left & _LOW) * (right & _LOW), (left & _LOW) * (right >> _HALF)
    other, high = (left >> _HALF) * (right & _LOW), (left >> _HALF) * (right >> _HALF)
    middle = (low >> _HALF) + (cross & _LOW) + (other & _LOW)
    found: Words = high + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    return found


def _secret_at(start: int, count: int) -> Words:
    return np.frombuffer(_SECRET, "<u8", count, start)
