"""Processes of one machine as if on several hosts."""

from __future__ import annotations

import os

from holdfast.comms.transport.liveness import HOST, this_host


def be_alone_on_host() -> None:
    """Make this process count as the only one of its host; its children too, unless they call this themselves."""
    os.environ[HOST] = str(os.getpid())
    this_host.cache_clear()
