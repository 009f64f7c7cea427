"""Chooses the memory plane by which the members of a job read each other's state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from holdfast.comms.communicator import Communicator
from holdfast.comms.memory_plane import MemoryPlane, memory
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Unavailable

_ONE_HOST = ("shm",)
_ANY_HOST = ("ucx", "nixl")


class MemoryPlanes:
    """The memory planes of this process, each opened at its first use."""

    def __init__(self) -> None:
        self._open: dict[str, MemoryPlane] = {}

    def agree(self, comm: Communicator, hosts: Sequence[str]) -> MemoryPlane | None:
        """The plane that all ranks can use; None if there is none. Collective over `comm`.

        `hosts` are the ranks' hosts. On one host it is `shm` if that works, else ucx or nixl. Between hosts it is ucx
        or nixl, and only if UCX_TLS is set: without a network named there, these planes use shared memory alone.
        """
        offers = comm.all_gather_object(_able(hosts))
        for name in offers[0]:
            if all(name in offer for offer in offers):
                if name not in self._open:
                    self._open[name] = memory(name)
                return self._open[name]
        return None

    def close(self) -> None:
        """Close every plane and its regions. Idempotent."""
        with contextlib.ExitStack() as closing:
            while self._open:
                closing.callback(self._open.popitem()[1].close)


def _able(hosts: Sequence[str]) -> list[str]:
    """The planes that this process can open and that reach all `hosts`, in order of preference."""
    if len(set(hosts)) > 1:
        return [name for name in _ANY_HOST if _works(name)] if os.environ.get("UCX_TLS") else []
    able = [name for name in _ONE_HOST if _works(name)]
    return able or [name for name in _ANY_HOST if _works(name)]


def _works(name: str) -> bool:
    backend = registry().backends.get(name)
    if backend is None or backend.memory is None:
        return False
    return not isinstance(registry().backend(name).status, Unavailable)
