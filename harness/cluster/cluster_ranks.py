"""The interface between `LocalCluster` and its ranks: processes, or threads for the `inproc` backend."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.comms.errors import PeerFailed, Revoked
from holdfast.ft.error_history import StepFailed
from holdfast.harness.cluster.errors import RunTimeout


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

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._calls = 0

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

    # -- the course of a call

    def _gather(self, outcomes: dict[int, RankResult], timeout: float, abort: bool) -> list[RankResult]:
        """Wait for the outcomes of all ranks; `outcomes` are those that are known already."""
        began = time.monotonic()
        deadline = began + timeout
        aborted = False
        while missing := [rank for rank in range(self._settings.size) if rank not in outcomes]:
            if abort and not aborted and (failed := [o for o in outcomes.values() if o.error is not None]):
                aborted = True
                deadline = min(deadline, time.monotonic() + self._settings.grace)
                for rank in missing:
                    self._abort(rank, f"rank {failed[0].rank} failed")
            if time.monotonic() >= deadline:
                error = RunTimeout(missing, time.monotonic() - began, "\n".join(self._end_stuck(missing)))
                moment = float("inf") if aborted else time.monotonic()
                outcomes |= {rank: RankResult(rank, moment, error=error) for rank in missing}
                break
            self._receive(outcomes, deadline)
        return [outcomes[rank] for rank in sorted(outcomes)]

    @abstractmethod
    def _receive(self, outcomes: dict[int, RankResult], deadline: float) -> None:
        """Wait for outcomes, not beyond the deadline, and add them."""

    @abstractmethod
    def _abort(self, rank: int, reason: str) -> None:
        """Abort the communicator of a rank, if it still runs."""

    @abstractmethod
    def _end_stuck(self, ranks: Sequence[int]) -> list[str]:
        """End ranks that have not returned; says where each of them was."""
