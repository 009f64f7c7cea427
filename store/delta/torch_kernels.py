"""Diff and patch of pieces by torch's ops alone, on any device: slower than the others, with equal bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from holdfast.comms.errors import CorruptData
from holdfast.store.delta.records import (
    BLOCK,
    WHOLE,
    Delta,
    ElementPiece,
    PackedDelta,
    blocks_of,
    most_of,
    record_bytes,
    to_eight,
)

Tensors = Sequence[torch.Tensor]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype by which elements of a size are compared: by their bits."""


def diff(base: Tensors, changed: Tensors, pieces: Sequence[ElementPiece]) -> PackedDelta:
    """The delta between the bytes of pieces: flat uint8 tensors, each aligned to its elements."""
    sizes = np.zeros(len(pieces), np.uint32)
    chunks: list[torch.Tensor] = []
    for at, (before, after, piece) in enumerate(zip(base, changed, pieces, strict=True)):
        dtype = INTEGERS[piece.itemsize]
        elements = after.view(dtype)
        where = (before.view(dtype) != elements).nonzero().view(-1)
        size = record_bytes(piece, len(where)) if len(where) else 0
        sizes[at] = size if size <= most_of(piece) else WHOLE
        if 0 < size <= most_of(piece):
            chunks.append(record_of(where, elements[where], piece))
    return PackedDelta(tuple(pieces), sizes, tuple(chunks))


def record_of(where: torch.Tensor, values: torch.Tensor, piece: ElementPiece) -> torch.Tensor:
    """The record of a piece with new `values` in the elements at the ascending places `where`."""
    blocks = blocks_of(piece.nbytes // piece.itemsize)
    counts = torch.bincount(where // BLOCK, minlength=blocks).to(torch.int32)
    places = where % BLOCK
    places = (places - BLOCK * (places >= BLOCK // 2)).to(torch.int16)  # its bits are those of the unsigned number
    record = torch.zeros(record_bytes(piece, len(where)), dtype=torch.uint8, device=where.device)
    at = 0
    for part in (counts, places, values):
        record[at : at + part.nbytes] = part.view(torch.uint8)
        at += to_eight(part.nbytes)
    return record


def make(base: Tensors, into: Tensors, delta: Delta) -> None:
    """Make each piece of `into` (which may be `base`) that is not `WHOLE`.

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


def patch(base: Tensors, into: Tensors, delta: Delta) -> list[int]:
    """Make each piece of `into` (which may be `base`) that is not `WHOLE`; returns the checksums of those.

    See `make` for errors.
    """
    make(base, into, delta)
    return [
        xxhash.xxh3_64_intdigest(piece.cpu().numpy().data)
        for piece, record in zip(into, delta.records, strict=True)
        if record is not None
    ]


def changes_in(record: torch.Tensor, piece: ElementPiece) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of the changed elements within the piece, and their values. Raises `CorruptData` for other bytes."""
    elements = piece.nbytes // piece.itemsize
    blocks = blocks_of(elements)
    head = to_eight(4 * blocks)
    sizes = torch.full((blocks,), BLOCK, device="cpu")
    sizes[-1:] = elements - BLOCK * (blocks - 1)
    if record.nbytes >= head:
        counts = record[: 4 * blocks].view(torch.int32).cpu().to(torch.int64)
        total = int(counts.sum())
        if bool(((counts >= 0) & (counts <= sizes)).all()) and total and record.nbytes == record_bytes(piece, total):
            ends = [4 * blocks, head + 2 * total, head + to_eight(2 * total) + piece.itemsize * total]
            places = record[head : ends[1]].view(torch.int16).cpu().to(torch.int64) & 0xFFFF
            block = torch.repeat_interleave(torch.arange(blocks, device="cpu"), counts)
            where = block * BLOCK + places
            ascending = bool((where[1:] > where[:-1]).all()) and bool((places < sizes[block]).all())
            filling = any(bool(record[end : to_eight(end)].any()) for end in ends)
            if ascending and not filling:
                return where, record[to_eight(ends[1]) : ends[2]].view(INTEGERS[piece.itemsize])
    raise CorruptData(f"a delta with a record of {record.nbytes} bytes that cannot be that of {piece}")
