"""`RegionOwner`: the process that exposed a region. It says whether that lives, and what to raise if not."""

from __future__ import annotations

from holdfast.comms.errors import RegionGone
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import Liveness, this_host

_NO_RANK = -1
"""Of this process among the owner's one process: the owner may be this process itself."""


class RegionOwner:
    """Watches one process. `here` says whether it is on this host."""

    def __init__(self, process: Peer) -> None:
        self.pid, self.here = process.pid, process.host == this_host()
        self._liveness = Liveness([process], rank=_NO_RANK)
        self.check()

    def check(self) -> None:
        """Raise `RegionGone` once the process is known to be gone."""
        if self._liveness.dead():
            raise gone(self.pid)

    def close(self) -> None:
        self._liveness.close()


def gone(pid: int) -> RegionGone:
    """The error of a call on a region of a process that has ended."""
    return RegionGone(f"process {pid}, which exposed this region, is gone; ask for a region of a process that runs")


def closed(pid: int) -> RegionGone:
    """The error of a call on a region that its owner has closed."""
    return RegionGone(f"process {pid} closed the region; what was read of it must not be used")
