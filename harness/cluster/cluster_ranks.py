"""The interface between `LocalCluster` and its ranks, processes or threads, and the errors of failed ranks.

A rank's exception is raised as a dynamic type that is both `RankFailed` and the original type, so that
`except ValueError` and `pytest.raises(PeerFailed)` work, while the text names the rank and has the remote traceback.

"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch.distributed as dist

from holdfast.comms.errors import HoldfastError, PeerFailed, Revoked
from holdfast.ft.membership.view import StepFailed
from holdfast.ft.processes.child_process import Exit
from holdfast.ft.processes.remote_calls import PackedError, error_of, one_line, pack_error, recipe_of, unpack_error
from holdfast.ft.processes.zygote_client import ForkedProcess


class RankFailed(HoldfastError):
    """A rank raised an exception: `rank` says which, `trace` is its traceback, `__cause__` the original error."""

    rank: int
    trace: str

    def __str__(self) -> str:
        said = one_line(self.__cause__) if self.__cause__ else super().__str__()
        return f"rank {self.rank}: {said}" + (f"\n\n{self.trace}" * bool(self.trace))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_failure, (self.rank, pack_error(self.__cause__ or self), self.trace)


class RankDied(RankFailed, PeerFailed):
    """The process of a rank ended: `exit` says how. Also a `PeerFailed`, with its `ranks` and `evidence`."""

    def __init__(self, rank: int, exit: Exit, evidence: str) -> None:  # noqa: A002
        self.rank, self.exit, self.trace = rank, exit, ""
        self.ranks, self.evidence = (rank,), evidence
        HoldfastError.__init__(self, f"rank {rank} died: {evidence}")

    __str__ = HoldfastError.__str__
    __reduce__ = HoldfastError.__reduce__


class RunTimeout(HoldfastError, TimeoutError):
    """Ranks did not return in time. `ranks` says which, `where` has their stacks."""

    def __init__(self, ranks: Sequence[int], waited: float, where: str) -> None:
        self.ranks, self.waited, self.where = tuple(ranks), waited, where
        super().__init__(
            f"rank(s) {', '.join(map(str, ranks))} did not return within {waited:.3g} s"
            + (f"; they were at:\n{where}" * bool(where))
        )


def rank_failure(rank: int, original: BaseException, trace: str) -> RankFailed:
    """The error to raise for `original`, which rank `rank` raised: a `RankFailed` that is also of its type."""
    try:
        failure = error_of(_both(type(original)), recipe_of(original))
    except TypeError:
        failure = RankFailed(*original.args)
    assert isinstance(failure, RankFailed)
    failure.rank, failure.trace, failure.__cause__ = rank, trace, original
    return failure


def _both(kind: type[BaseException]) -> type[BaseException]:
    """A type that is both `RankFailed` and `kind`; `RankFailed` alone if `kind` ends interpreters (SystemExit ...)."""
    if issubclass(RankFailed, kind) or not issubclass(kind, Exception):
        return RankFailed
    methods = {"__str__": RankFailed.__str__, "__reduce__": RankFailed.__reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, RankFailed), methods)


def _unpack_failure(rank: int, packed: PackedError, trace: str) -> RankFailed:
    return rank_failure(rank, unpack_error(packed), trace)


# Ranks ----------------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a function in a process, at `time`: a pickled `value`, or an `error`. `number` is that of the call."""

    time: float
    value: bytes = b""
    error: PackedError | None = None
    number: int = 0

    def result(self, rank: int) -> RankResult:
        """The outcome of rank `rank`."""
        if self.error is not None:
            error = rank_failure(rank, unpack_error(self.error), self.error.trace)
            return RankResult(rank, self.time, error=error)
        try:
            return RankResult(rank, self.time, cloudpickle.loads(self.value))
        except Exception as caught:
            error = rank_failure(rank, TypeError(f"its result cannot be unpickled here: {caught!r}"), "")
            return RankResult(rank, self.time, error=error)


def death(rank: int, process: ForkedProcess) -> RankResult:
    """The outcome of a rank after its process has ended without a word, or while it ends."""
    try:
        exit_ = process.wait(5.0)
    except TimeoutError:
        process.kill()
        exit_ = process.wait(5.0)
    return RankResult(rank, time.monotonic(), error=RankDied(rank, exit_, process.epitaph()))


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
        abort: bool,
    ) -> list[RankResult]:
        """Call `fn(comm, *args, **kwargs)` on every rank, with a fresh communicator; returns outcomes in rank order.

        With `abort` the first failure aborts the communicators of the others; ranks that still do not return within the
        grace are ended, and so are those that have not returned after the timeout of the settings.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks. Idempotent."""

    # -- the course of a call

    def _link(self, rank: int, meeting: str | dist.Store) -> dict[str, Any]:
        """The arguments of `holdfast.comms.connect` for a rank; each op has the timeout of the call."""
        settings = self._settings
        return {
            "backend": settings.backend,
            "rank": rank,
            "size": settings.size,
            "rendezvous": meeting,
            "name": f"call-{self._calls}",
            "device": settings.device,
            "timeout": settings.timeout,
        }

    def _gather(self, outcomes: dict[int, RankResult], abort: bool) -> list[RankResult]:
        """Wait for the outcomes of all ranks; `outcomes` are those that are known already."""
        began = time.monotonic()
        deadline = began + self._settings.timeout
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
