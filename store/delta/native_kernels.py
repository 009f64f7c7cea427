"""Diff and patch of pieces in CPU memory: compiled, in several threads, without the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.comms import _native
from holdfast.comms.errors import CorruptData
from holdfast.store.data.digests import LEAST_BYTES
from holdfast.store.delta.records import BLOCK, WHOLE, Delta, ElementPiece, PackedDelta, Sizes, most_of

CHUNK_BYTES = 4 << 20
"""The least size of the memory for records that a thread asks for at once."""
LEAST_OF_THREAD = 4 << 20
"""Bytes for which another thread pays."""
_SLACK = 2 * BLOCK + 64
"""Bytes that the compiled code may write behind a record's limit before it gives the record up (element_diff.c)."""

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")


def diff(base: Tensors, changed: Tensors, pieces: Sequence[ElementPiece], *, portable: bool = False) -> PackedDelta:
    """The delta between the bytes of pieces, flat uint8 tensors; `portable` uses no vector instructions."""
    table = np.empty((len(pieces), 4), np.uint64)
    table[:, 0] = [each.data_ptr() for each in base]
    table[:, 1] = [each.data_ptr() for each in changed]
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


def patch(base: Tensors, into: Tensors, delta: Delta) -> list[int]:
    """Make each piece of `into` (which may be `base`) that is not `WHOLE`; returns the checksums of those.

    Raises `CorruptData` for a record that cannot be that of its piece; pieces are then half done.
    """
    chosen = [at for at, record in enumerate(delta.records) if record is not None]
    pieces = [delta.pieces[at] for at in chosen]
    records = [record for record in delta.records if record is not None]
    table = np.empty((len(chosen), 6), np.uint64)
    table[:, 0] = [base[at].data_ptr() for at in chosen]
    table[:, 1] = [into[at].data_ptr() for at in chosen]
    table[:, 2] = [piece.nbytes for piece in pieces]
    table[:, 3] = [piece.itemsize for piece in pieces]
    table[:, 4] = [record.data_ptr() for record in records]
    table[:, 5] = [record.nbytes for record in records]

    sums = np.zeros(len(chosen), np.uint64)

    def run(start: int, end: int) -> int:
        rows, found = table[start:end], sums[start:end]
        return _native.patch_pieces(rows.ctypes.data, end - start, found.ctypes.data) - (end - start)

    if any(_in_threads(run, pieces)):
        raise CorruptData("a delta with a record that cannot be that of its piece")
    checksums: list[int] = sums.tolist()
    for number, at in enumerate(chosen):
        if pieces[number].nbytes < LEAST_BYTES:
            checksums[number] = xxhash.xxh3_64_intdigest(into[at].numpy().data)
    return checksums


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
