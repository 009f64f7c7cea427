"""The lock under which atomics change a rank's part of a window: its holder is named, and a wait for it can end.

A holder that was stopped keeps the lock for as long as it is. So whoever waits gives way, looks whether there is still
something to wait for, and at the deadline names the holder, which has written its rank into the header.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.comms._native import Words
from holdfast.comms.errors import OpTimeout

_give_way = ctypes.CDLL(None).sched_yield
"""Lets go of the GIL, which os.sched_yield does not: the holder may be a thread of this process."""
_YIELDS = 200
_SLEEP_SECONDS = 0.0002


class WindowLock:
    """The lock of `target`'s part, for rank `me`. `take()` says whether the lock could be taken now; `give_back()` ends
    that. Both are the backend's; what it takes must end with its holder's process. Word `holder` of `header` is the
    rank that has it, plus one.
    """

    def __init__(
        self,
        target: int,
        me: int,
        header: Words,
        holder: int,
        take: Callable[[], bool],
        give_back: Callable[[], None],
    ) -> None:
        self._target, self._me = target, me
        self._header, self._holder = header, holder
        self._take, self._give_back = take, give_back

    @contextmanager
    def held(self, deadline: float, look: Callable[[], object]) -> Iterator[None]:
        """Hold the lock. Raises `OpTimeout`, and what `look()` raises, which is called while that takes time."""
        began, turns = time.monotonic(), 0
        while not self._take():
            now = time.monotonic()
            if now >= deadline:
                raise OpTimeout("atomic", 0, now - began, (self._held_by(),))
            look()
            turns += 1
            if turns < _YIELDS:
                _give_way()
            else:
                time.sleep(_SLEEP_SECONDS)
        self._header[self._holder] = self._me + 1
        try:
            yield
        finally:
            self._header[self._holder] = 0
            self._give_back()

    def _held_by(self) -> int:
        """The rank that has the lock, as far as it has said so; else the one whose lock it is."""
        return (self._header[self._holder] or self._target + 1) - 1
