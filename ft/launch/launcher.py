"""The interface to programs that must start the ranks of a backend together (`Capabilities.launcher`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.comms.errors import HoldfastError


class StartFailed(HoldfastError):
    """A process could not be started."""


class Launch(ABC):
    """A running launcher. The caller starts the ranks, with the environment that the launcher would have set."""

    environ: dict[int, dict[str, str]]
    """By rank, the variables to add to the environment of its process."""

    @abstractmethod
    def attach(self, rank: int, pidfd: int) -> None:
        """Tie the process `pidfd` to `rank`: the launcher sees its end as the end of the rank that it started."""

    @abstractmethod
    def close(self) -> None:
        """End the launcher and all processes that it started. Idempotent."""


class NoLaunch(Launch):
    """For backends that need no launcher."""

    def __init__(self, size: int) -> None:
        self.environ = {rank: {} for rank in range(size)}

    def attach(self, rank: int, pidfd: int) -> None:
        pass

    def close(self) -> None:
        pass
