"""Copies between tensors of this process and the memory of a store, verified by checksums.

Where the plane can map the memory, one call of compiled code copies and digests the pieces of all tensors, with as many
threads as torch has. Elsewhere the plane reads and writes them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.comms.errors import CorruptData, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.ft.state.boxes import stretch, whole
from holdfast.store.data.digests import Words, copy_and_digest
from holdfast.store.torchstore.access.contents import block_at, bytes_of, part, tensor_of
from holdfast.store.torchstore.access.reading import PieceCopy
from holdfast.store.torchstore.service.records import PIECE_BYTES, Location, StoredBlock

COPY_SECONDS = 30.0
SLOW_COPY = 100e6
"""Bytes a second that a copy reaches in any case: its limit is `COPY_SECONDS` and the time at this speed."""

Chunks = Mapping[int, Handle]


class MemoryAccess:
    """Reads and writes a store's memory. Thread-safe."""

    def __init__(self, plane: MemoryPlane) -> None:
        self._plane = plane

    def write(self, chunks: Chunks, places: Sequence[Location], tensors: Sequence[torch.Tensor]) -> list[StoredBlock]:
        """Copy tensors to their places; returns their blocks. Raises `RegionGone` if the store has ended."""
        sources = [bytes_of(tensor) for tensor in tensors]
        mapped = self._mapped(chunks)
        pieces = [
            _pieces(source.data_ptr(), 0, source.nbytes, mapped[place.chunk].data_ptr() + place.offset if mapped else 0)
            for place, source in zip(places, sources, strict=True)
        ]
        sums = iter(copy_and_digest(_together(pieces)).tolist())
        if not mapped:
            for place, source in zip(places, sources, strict=True):
                limit = _limit(source.nbytes)
                self._plane.write(chunks[place.chunk], source, place.offset, timeout=limit).wait()
        return [
            block_at(tensor, place, tuple(next(sums) for _ in range(len(rows))))
            for tensor, place, rows in zip(tensors, places, pieces, strict=True)
        ]

    def read(self, chunks: Chunks, copies: Sequence[PieceCopy]) -> None:
        """Make copies, and verify what was copied.

        Raises `CorruptData` if the bytes are not those that were put, `RegionGone` if the store has ended.
        """
        mapped = self._mapped(chunks)
        fetched = [self._source(chunks, mapped, copy.block) for copy in copies]
        direct = [_is_direct(copy) for copy in copies]
        jobs: list[Words] = []
        expected: list[int] = []
        for copy, source, straight in zip(copies, fetched, direct, strict=True):
            if copy.block.at is not None:
                first, last = (each * copy.block.torch_dtype.itemsize for each in _range(copy))
                begin = first // PIECE_BYTES * PIECE_BYTES
                end = min(-(-last // PIECE_BYTES) * PIECE_BYTES, copy.block.nbytes)
                jobs.append(_pieces(source.data_ptr(), begin, end, copy.target.data_ptr() if straight else 0))
                expected += copy.block.sums[begin // PIECE_BYTES : -(-end // PIECE_BYTES)]
        if copy_and_digest(_together(jobs)).tolist() != expected:
            raise CorruptData("what the store holds is not what was put: its memory was damaged; put it anew")
        for copy, source, straight in zip(copies, fetched, direct, strict=True):
            if not straight:
                tensor = source.view(copy.block.torch_dtype).view(copy.block.shape)
                copy.target.copy_(part(tensor, copy.box))

    def close(self) -> None:
        """Close the plane. Idempotent."""
        self._plane.close()

    def _mapped(self, chunks: Chunks) -> dict[int, torch.Tensor]:
        """The chunks as tensors; none if the plane cannot map them."""
        try:
            return {chunk: self._plane.map_writable(handle) for chunk, handle in chunks.items()}
        except Unsupported:
            return {}

    def _source(self, chunks: Chunks, mapped: Mapping[int, torch.Tensor], block: StoredBlock) -> torch.Tensor:
        """The bytes of a block, where they lie or in a copy."""
        place = block.at
        if place is None:
            return bytes_of(tensor_of(block.inline or b"", block))
        if mapped:
            return mapped[place.chunk][place.offset : place.offset + block.nbytes]
        into = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
        self._plane.read(chunks[place.chunk], into, place.offset, timeout=_limit(into.nbytes)).wait()
        return into


def _pieces(source: int, begin: int, end: int, target: int) -> Words:
    """The jobs for bytes of a tensor from `begin`, the first byte of a piece, to `end`."""
    starts = np.arange(begin, end, PIECE_BYTES, dtype=np.uint64)
    jobs = np.zeros((len(starts), 5), np.uint64)
    jobs[:, 0] = starts + np.uint64(source)
    jobs[:, 1] = np.minimum(np.uint64(PIECE_BYTES), np.uint64(end) - starts)
    jobs[:, 2] = starts + np.uint64(target) if target else 0
    return jobs


def _together(jobs: Sequence[Words]) -> Words:
    return np.concatenate(jobs) if jobs else np.zeros((0, 5), np.uint64)


def _is_direct(copy: PieceCopy) -> bool:
    """Whether a whole block is copied to one stretch of memory."""
    return copy.block.at is not None and copy.box == whole(copy.block.shape) and copy.target.is_contiguous()


def _range(copy: PieceCopy) -> tuple[int, int]:
    """The elements of a block from the first to the last that is copied."""
    return stretch(copy.box, whole(copy.block.shape))


def _limit(nbytes: int) -> float:
    return COPY_SECONDS + nbytes / SLOW_COPY
