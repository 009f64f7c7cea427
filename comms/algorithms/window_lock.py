"""The lock for atomics on a rank's part of a window. Its holder is known, and a wait for it can end.

A stopped holder keeps the lock for as long as it is stopped. So a waiter yields, checks whether it still has to wait,
and at the deadline names the holder, which has written its rank into the header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.comms._native import Words
from holdfast.comms.errors import OpTimeout
from holdfast.comms.system.cpu_wait import yield_cpu

_YIELDS = 200
_SLEEP_SECONDS = 0.0002


class WindowLock:
    """The lock of `target`'s part, for rank `me`.

    The backend supplies `try_acquire()`, which returns whether it took the lock, and `release()`. The lock must end
    with its holder's process. Word `holder` of `header` is the rank that holds it, plus one.
    """

    def __init__(
        self,
        target: int,
        me: int,
        header: Words,
        holder: int,
        try_acquire: Callable[[], bool],
        release: Callable[[], None],
    ) -> None:
        self._target, self._me = target, me
        self._header, self._holder = header, holder
        self._try_acquire, self._release = try_acquire, release

    @contextmanager
    def held(self, deadline: float, look: Callable[[], object]) -> Iterator[None]:
        """Hold the lock. Raises `OpTimeout`, and what `look()` raises, which is called while waiting."""
        began, turns = time.monotonic(), 0
        while not self._try_acquire():
            now = time.monotonic()
            if now >= deadline:
                raise OpTimeout("atomic", 0, now - began, (self._held_by(),))
            look()
            turns += 1
            if turns < _YIELDS:
                yield_cpu()
            else:
                time.sleep(_SLEEP_SECONDS)
        self._header[self._holder] = self._me + 1
        try:
            yield
        finally:
            self._header[self._holder] = 0
            self._release()

    def _held_by(self) -> int:
        """The rank that holds the lock, if it has written its rank already; else the rank that owns the lock."""
        return (self._header[self._holder] or self._target + 1) - 1
