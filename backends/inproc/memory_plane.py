"""The memory plane inside one process: that of a host, for the regions of this process alone."""

from __future__ import annotations

from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.region_table import TableAddress
from holdfast.comms.errors import Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.liveness import this_process


def open_plane() -> InprocPlane:
    """A memory plane for this process alone. What it exposes is open until it is closed."""
    return InprocPlane()


class InprocPlane(HostPlane):
    """See `HostPlane`. For ranks that are threads, tests and notebooks."""

    name = "inproc"

    def _place(self, handle: Handle) -> TableAddress:
        place = super()._place(handle)
        if place.owner != this_process():
            raise Unsupported(
                f"the inproc plane cannot reach process {place.owner.pid}", "between processes use plane 'shm'"
            )
        return place
