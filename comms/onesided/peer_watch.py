"""`PeerWatch`: the liveness of the ranks behind a window, looked at once for all windows of a communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from holdfast.comms.errors import HoldfastError, RegionGone
from holdfast.comms.transport.liveness import Liveness

_LOOK_SECONDS = 0.001


class PeerWatch:
    """Whether a communicator and its ranks live, as of a millisecond ago at most; shared by its windows.

    `check_live` raises what ended the communicator; else it returns the ranks with a connection known to be broken.
    """

    def __init__(self, liveness: Liveness, check_live: Callable[[], Iterable[int]]) -> None:
        self._liveness, self._check_live = liveness, check_live
        self._looking, self._next_look = threading.Lock(), 0.0
        self._dead: frozenset[int] = frozenset()

    def dead(self) -> frozenset[int]:
        """The dead ranks, as of a millisecond ago at most. Raises what ended the communicator."""
        return self.look() if time.monotonic() >= self._next_look else self._dead

    def look(self) -> frozenset[int]:
        """The dead ranks, as of now. Raises what ended the communicator."""
        with self._looking:
            self._dead = self._dead.union(self._liveness.dead())
            self._dead = self._dead.union(self._check_live())
            self._next_look = time.monotonic() + _LOOK_SECONDS
        return self._dead

    def check(self, rank: int) -> None:
        """Raise if the process of `rank` has ended, or the communicator, perhaps since that process has."""
        try:
            dead = self.dead()
        except HoldfastError:
            if rank in self._dead:
                raise gone(rank) from None
            raise
        if rank in dead:
            raise gone(rank)


def gone(rank: int) -> RegionGone:
    """The error of a call that accesses memory of a dead rank."""
    return RegionGone(f"the process of rank {rank} is gone, and its window with it; rebuild without it")
