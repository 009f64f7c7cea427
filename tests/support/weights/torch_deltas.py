"""Diff and patch of pieces by torch's ops alone: what the store's kernels are compared with, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

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
    to_eight,
)

Tensors = Sequence[torch.Tensor]


def torch_diff(base: Tensors, changed: Tensors, pieces: Sequence[ElementPiece]) -> PackedDelta:
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


def torch_patch(base: Tensors, into: Tensors, delta: Delta) -> None:
    """Make each piece of `into` that is not `WHOLE`. Raises `CorruptData` for a record that cannot be its piece's."""
    for before, after, record, piece in zip(base, into, delta.records, delta.pieces, strict=True):
        if record is None:
            continue
        changes = changes_in(record, piece) if record.nbytes else None
        after.copy_(before)
        if changes is not None:
            where, values = changes
            after.view(INTEGERS[piece.itemsize])[where.to(after.device)] = values.to(after.device)
