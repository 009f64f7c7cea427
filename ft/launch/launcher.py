"""The interface to programs that must start the ranks of a backend together (`Capabilities.launcher`)."""

from __future__ import annotations

import os
import signal

from holdfast.comms.errors import HoldfastError
from holdfast.ft.launch.held_directory import SHARED_MEMORY, HeldDirectory


class StartFailed(HoldfastError):
    """A process could not be started."""


class Launch:
    """A running launcher, here for backends that need none. The caller starts the ranks, with its environment.

    Shared memory of the backends' libraries is in a directory of its own, removed by `close`: a rank that is killed
    while UCX or Open MPI makes a segment leaves the file of it.
    """

    def __init__(self) -> None:
        self._shared = HeldDirectory("holdfast-ranks-", SHARED_MEMORY)
        self._of_rank: dict[int, dict[str, str]] = {}

    def environ(self, rank: int) -> dict[str, str]:
        """The variables to add to the environment of the process of `rank`."""
        own = self._of_rank.get(rank, {})
        if SHARED_MEMORY is None or "UCX_POSIX_DIR" in os.environ:
            return own
        return {"UCX_POSIX_DIR": str(self._shared.path), **own}

    def attach(self, rank: int, pidfd: int) -> None:
        """Tie the process `pidfd` to `rank`: the launcher sees its end as the end of the rank that it started."""

    def close(self) -> None:
        """End the launcher and all processes that it started. Idempotent."""
        self._shared.close()


def how_it_ended(code: int) -> str:
    """How a process ended, in words; `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    known = {each.value: each.name for each in signal.Signals}
    return f"was ended by {known.get(-code, f'signal {-code}')}"
