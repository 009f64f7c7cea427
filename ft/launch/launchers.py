"""Starts the launcher that a backend needs (`Capabilities.launcher`)."""

from __future__ import annotations

from holdfast.comms.errors import Unsupported
from holdfast.ft.launch.launcher import Launch, NoLaunch


def launch(launcher: str, size: int) -> Launch:
    """Start the launcher of this name for `size` ranks. Raises `StartFailed`; `Unsupported` for an unknown name."""
    if not launcher:
        return NoLaunch()
    if launcher == "mpirun":
        from holdfast.ft.launch.mpirun import MpiJob

        return MpiJob(size)
    raise Unsupported(f"starting ranks with {launcher!r}", "start them yourself and call comms.connect in each")
