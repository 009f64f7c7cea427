"""A barrier that belongs to no library under test: ranks wait here before each timing, so that all start alike.

Each rank has a counter in a shared file mapping and writes only its own. The barrier orders starts, not data.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

_SLOT = 8
"""Counters are eight words apart: one cache line each."""


class WorkerBarrier:
    """The barrier of `ranks` ranks over the file at `path`, for `rank`. A wait calls `give_way` in a loop."""

    def __init__(self, path: Path, rank: int, ranks: int, give_way: Callable[[], object] = os.sched_yield) -> None:
        with path.open("r+b") as file:
            self._pages = mmap.mmap(file.fileno(), ranks * _SLOT * 8)
        self._counters = memoryview(self._pages).cast("Q")
        self._mine = rank * _SLOT
        self._others = [other * _SLOT for other in range(ranks) if other != rank]
        self._turn = 0
        self._give_way = give_way

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        """Write the file that all ranks then map."""
        path.write_bytes(bytes(ranks * _SLOT * 8))

    def wait(self, timeout: float = 30.0) -> None:
        """Return when all ranks are here. Raises TimeoutError after `timeout` seconds."""
        self._turn += 1
        counters, turn = self._counters, self._turn
        counters[self._mine] = turn
        deadline = time.monotonic() + timeout
        for other in self._others:
            while counters[other] < turn:
                self._give_way()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all ranks came to the barrier within {timeout} s")

    def close(self) -> None:
        self._counters.release()
        self._pages.close()
