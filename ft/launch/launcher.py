"""The seam to programs that must start the ranks of a backend together (`Capabilities.launcher`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.comms.errors import HoldfastError


class StartFailed(HoldfastError):
    """A process could not be started."""


class Launch(ABC):
    """A running launcher. Others start the ranks, with what the launcher would have given them."""

    environ: dict[int, dict[str, str]]
    """By rank, what to add to the environment of its process."""

    @abstractmethod
    def attach(self, rank: int, pidfd: int) -> None:
        """Let the launcher know of the end of this process as of that of the rank that it started."""

    @abstractmethod
    def close(self) -> None:
        """End the launcher and all that it started. Idempotent."""


class NoLaunch(Launch):
    """For backends whose ranks anybody may start."""

    def __init__(self, size: int) -> None:
        self.environ = {rank: {} for rank in range(size)}

    def attach(self, rank: int, pidfd: int) -> None:
        pass

    def close(self) -> None:
        pass
