"""The memory of the parts that a process keeps: bounded, reused, and touched before it is needed.

To touch fresh memory costs several times as much as to copy into memory that was touched before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from holdfast.comms.errors import Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store import cancellation
from holdfast.store.errors import StoreFull

ROUNDING = 64 << 10
MOST_SPARE = 4
"""The number of dropped parts that leave their memory to the next ones."""
LOOK_SECONDS = 0.05
"""Seconds between two looks for memory that readers have let go: no event tells of it."""


class MemoryPool:
    """Memory of `plane` for parts, at most `limit` bytes at a time (None: no limit). Thread-safe.

    Memory that a reader has mapped for good is not reused before the mapping ends; it counts until then. Before an
    `allocate` finds no room, `make_room` is called: whether it gave memory back.
    """

    def __init__(self, plane: MemoryPlane, limit: int | None) -> None:
        self._plane, self._budget = plane, _Budget(limit)
        self._budget.pools.append(self)
        self._changed = self._budget.changed
        self._spare: list[torch.Tensor] = []
        self._lent: list[torch.Tensor] = []
        self._most_spare = MOST_SPARE
        self.make_room: Callable[[], bool] = bool
        self._closed = False

    @property
    def limit(self) -> int | None:
        return self._budget.limit

    @property
    def used(self) -> int:
        """Bytes in use, by mappings too and from all pools of this limit, without spare memory."""
        with self._changed:
            return self._budget.used - sum(each.nbytes for pool in self._budget.pools for each in pool._spare)

    def beside(self) -> MemoryPool:
        """A pool for memory of another kind within the same limit."""
        other = MemoryPool(self._plane, None)
        other._budget, other._changed = self._budget, self._changed
        self._budget.pools.append(other)
        return other

    def allocate(self, nbytes: int, deadline: float, version: int) -> torch.Tensor:
        """Memory of at least `nbytes` for a part of `version`. Waits while the limit leaves no room.

        Raises `StoreFull` at the `deadline`, or at once if the part alone is larger than the limit.
        """
        size = -(-max(nbytes, 1) // ROUNDING) * ROUNDING
        if self.limit is not None and size > self.limit:
            raise StoreFull(version, nbytes, self.used, self.limit, 0.0)
        began = time.monotonic()
        with self._changed:
            while True:
                cancellation.check()
                self._take_back()
                if (found := self._fitting(size)) is not None:
                    return found
                if self._drop_spare(size):
                    self._budget.used += size
                    break
                if self.make_room():
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise StoreFull(version, nbytes, self.used, self.limit or 0, time.monotonic() - began)
                self._changed.wait(min(left, LOOK_SECONDS))
        try:
            return self._plane.empty(size, mappable=True)
        except BaseException:
            with self._changed:
                self._budget.used -= size
                self._changed.notify_all()
            raise

    def give_back(self, memory: torch.Tensor) -> None:
        """Return memory of `allocate` for reuse. The caller has closed its region."""
        with self._changed:
            self._lent.append(memory)
            self._take_back()
            self._changed.notify_all()

    def reserve(self, nbytes: int, count: int) -> None:
        """Touch memory for `count` parts of `nbytes` now, so that their publications need not.

        Raises `StoreFull`, `Mismatch`.
        """
        if self._closed:
            raise Mismatch("the store of this memory is closed; open another")
        self._most_spare = max(self._most_spare, count)
        with ExitStack() as taken:
            for _ in range(count):  # each stays taken until the last is: the next one would get its memory
                taken.callback(self.give_back, self.allocate(nbytes, time.monotonic(), 0))

    def close(self) -> None:
        """Let all spare memory go. Idempotent."""
        with self._changed:
            self._closed = True
            self._spare.clear()
            self._lent.clear()
            self._changed.notify_all()

    # -- under the lock

    def _take_back(self) -> None:
        """Make memory spare that no reader maps any more."""
        free = [memory for memory in self._lent if not self._plane.is_lent(memory)]
        if free:
            self._lent = [memory for memory in self._lent if not any(memory is each for each in free)]
            self._spare = [*free, *self._spare]
            for memory in self._spare[self._most_spare :]:
                self._budget.used -= memory.nbytes
            del self._spare[self._most_spare :]

    def _fitting(self, size: int) -> torch.Tensor | None:
        fits = [each for each in self._spare if size <= each.nbytes <= 2 * size + ROUNDING]
        if not fits:
            return None
        best = min(fits, key=lambda each: each.nbytes)
        self._spare = [each for each in self._spare if each is not best]
        return best

    def _drop_spare(self, size: int) -> bool:
        """Drop spare memory of all pools until `size` more bytes fit; whether they do."""
        budget = self._budget
        for pool in budget.pools:
            while not budget.fits(size) and pool._spare:
                budget.used -= pool._spare.pop().nbytes
        return budget.fits(size)


class _Budget:
    """The limit of several pools, and the bytes that they have allocated."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.used = limit, 0
        self.changed = threading.Condition()
        self.pools: list[MemoryPool] = []

    def fits(self, size: int) -> bool:
        return self.limit is None or self.used + size <= self.limit
