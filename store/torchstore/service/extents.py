"""Divides a chunk of memory into extents, first fit; neighbours that are free again become one. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_left

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
