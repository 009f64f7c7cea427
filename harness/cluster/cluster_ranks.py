"""The interface between `LocalCluster` and its ranks: processes, or threads for the `inproc` backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import PeerFailed, Revoked
from holdfast.ft.error_history import StepFailed


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of a call on one rank: its `value`, or the `error` to raise.

    `time` is that of the outcome (`time.monotonic()` seconds). `error` is a `RankFailed`, `RankDied` or `RunTimeout`.
    """

    rank: int
    time: float
    value: Any = None
    error: Exception | None = None

    @property
    def is_consequence(self) -> bool:
        """True if the error only says that another rank failed, or that we ended this one."""
        cause = None if self.error is None else self.error.__cause__
        return isinstance(cause, PeerFailed | Revoked | StepFailed)


def values(outcomes: Sequence[RankResult]) -> list[Any]:
    """The values in rank order; raises the first failure, causes before consequences."""
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    if failures:
        first = min(failures, key=lambda outcome: (outcome.is_consequence, outcome.time))
        assert first.error is not None
        raise first.error
    return [outcome.value for outcome in outcomes]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of all calls of a cluster. Times in seconds."""

    size: int
    backend: str
    device: str | None
    timeout: float
    grace: float
    threads: int
    environ: Mapping[str, str]
    echo: bool
    launcher: str = ""
    """The program that must start the processes of this backend together; see `Capabilities.launcher`."""


class ClusterRanks(ABC):
    """Ranks that call functions together. Not safe to use from several threads."""

    @abstractmethod
    def start(self) -> None:
        """Start the ranks that do not run yet."""

    @abstractmethod
    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float,
        abort: bool,
    ) -> list[RankResult]:
        """Call `fn(comm, *args, **kwargs)` on every rank, with a fresh communicator; returns outcomes in rank order.

        With `abort` the first failure aborts the communicators of the others; ranks that still do not return within the
        grace are ended. Ranks that have not returned after `timeout` seconds are ended.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks. Idempotent."""
