"""The memory of a store: chunks that clients write to and read from over the memory plane, divided into extents.

An extent is free when nothing needs it: the directory, a client that fills it (a ticket), or one that reads it (a
lease). So no byte changes under a reader, and a value that is replaced gives its memory to the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region
from holdfast.store.torchstore.service.records import Location

CHUNK_BYTES = 64 << 20
"""The least bytes of a chunk."""


ALIGNMENT = 64


def rounded(nbytes: int) -> int:
    """The bytes that an extent for `nbytes` takes."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class Extents:
    """The free parts of `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.free = nbytes // ALIGNMENT * ALIGNMENT
        self._starts = [0] if self.free else []
        self._sizes = {0: self.free} if self.free else {}

    def take(self, nbytes: int) -> int | None:
        """The first byte of an extent for `nbytes`; None if no free part is large enough."""
        size = rounded(nbytes)
        for index, start in enumerate(self._starts):
            there = self._sizes[start]
            if there < size:
                continue
            del self._sizes[start]
            if there == size:
                del self._starts[index]
            else:
                self._starts[index] = start + size
                self._sizes[start + size] = there - size
            self.free -= size
            return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Free an extent that `take(nbytes)` returned."""
        size = rounded(nbytes)
        self.free += size
        index = bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(self._starts.pop(index))
        if index > 0 and (before := self._starts[index - 1]) + self._sizes[before] == start:
            self._sizes[before] += size
            return
        self._starts.insert(index, start)
        self._sizes[start] = size


@dataclass(slots=True)
class _MemoryChunk:
    region: Region
    extents: Extents


@dataclass(slots=True)
class _Extent:
    nbytes: int
    users: int


class StoreMemory:
    """Memory of this process that a memory plane exposes. Not thread-safe, but for `allocate`."""

    def __init__(self, plane: MemoryPlane) -> None:
        self.used = 0
        """The bytes of all extents."""
        self._plane = plane
        self._chunks: dict[int, _MemoryChunk] = {}
        self._extents: dict[Location, _Extent] = {}
        self._made = 0

    @property
    def held(self) -> int:
        """The bytes of all chunks."""
        return sum(chunk.extents.nbytes for chunk in self._chunks.values())

    def take(self, sizes: Sequence[int]) -> list[Location] | None:
        """Take an extent for each size, all in one chunk, each with one user.

        None if no chunk has room for them.
        """
        total = sum(map(rounded, sizes))
        for number, chunk in self._chunks.items():
            if chunk.extents.free >= total and (offsets := _take_all(chunk.extents, sizes)) is not None:
                taken = [Location(number, offset) for offset in offsets]
                self._extents |= {at: _Extent(size, 1) for at, size in zip(taken, sizes, strict=True)}
                self.used += total
                return taken
        return None

    def allocate(self, sizes: Sequence[int]) -> torch.Tensor:
        """Memory for a chunk with room for these sizes. Takes long: its pages are touched."""
        return self._plane.empty(max(sum(map(rounded, sizes)), CHUNK_BYTES), mappable=True)

    def add(self, memory: torch.Tensor) -> None:
        """Add a chunk."""
        self._made += 1
        self._chunks[self._made] = _MemoryChunk(self._plane.expose(memory, writable=True), Extents(memory.nbytes))

    def handle(self, chunk: int) -> Handle:
        """The handle of a chunk."""
        return self._chunks[chunk].region.handle

    def nbytes(self, location: Location) -> int:
        """The size of an extent. Raises `CorruptData` if there is none."""
        return self._extent(location).nbytes

    def use(self, locations: Iterable[Location]) -> None:
        """Add a user to extents. Raises `CorruptData` if one does not exist."""
        for extent in [self._extent(location) for location in locations]:
            extent.users += 1

    def release(self, locations: Iterable[Location]) -> None:
        """Remove a user of extents; without users they are free, and chunks that are not needed go."""
        for location in locations:
            extent = self._extent(location)
            extent.users -= 1
            if not extent.users:
                del self._extents[location]
                self._chunks[location.chunk].extents.give(location.offset, extent.nbytes)
                self.used -= rounded(extent.nbytes)
        self._shrink()

    def close(self) -> None:
        """Stop exposing the memory. Idempotent."""
        chunks, self._chunks, self._extents = self._chunks, {}, {}
        with ExitStack() as stack:
            for chunk in chunks.values():
                stack.callback(chunk.region.close)

    def _extent(self, location: Location) -> _Extent:
        extent = self._extents.get(location)
        if extent is None:
            raise CorruptData(f"the store has no memory at {location}")
        return extent

    def _shrink(self) -> None:
        """Release empty chunks while more is empty than is in use.

        The chunks that stay serve the next put without a wait.
        """
        empty = [number for number, chunk in self._chunks.items() if chunk.extents.free == chunk.extents.nbytes]
        spare, needed = sum(self._chunks[each].extents.nbytes for each in empty), max(self.used, CHUNK_BYTES)
        for number in empty:
            if spare <= needed:
                return
            spare -= self._chunks[number].extents.nbytes
            self._chunks.pop(number).region.close()


def _take_all(extents: Extents, sizes: Sequence[int]) -> list[int] | None:
    """Take extents of all sizes, or none."""
    taken: list[int] = []
    for size in sizes:
        offset = extents.take(size)
        if offset is None:  # what is free lies in parts that are too small
            for given, nbytes in zip(taken, sizes, strict=False):
                extents.give(given, nbytes)
            return None
        taken.append(offset)
    return taken
