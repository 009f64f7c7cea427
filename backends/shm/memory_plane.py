"""The memory plane of one host: any process reads the memory that another exposed, where it lies."""

from __future__ import annotations

from holdfast.backends.common.host_plane import HostPlane


def open_plane() -> ShmPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return ShmPlane()


class ShmPlane(HostPlane):
    """See `HostPlane`."""

    name = "shm"
