"""What the benchmarks share: profiles, and rank processes that stay alive from sample to sample.

asv runs each benchmark, with each combination of its parameters, in a process of its own. The ranks are started once
in it, by the first sample that needs them, and are asleep between samples. They are told to stop when the process ends,
and end by themselves if it was killed: their socket to it is then closed.
"""

from __future__ import annotations

import atexit
import os
import statistics
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeVar

from holdfast.harness.bench.contestants import ContestantGroup, missing
from holdfast.harness.bench.operations import OPERATIONS
from holdfast.harness.bench.run import BenchPlan, Collective, TimedLibrary
from holdfast.harness.measure.workers import WorkerFailed

T = TypeVar("T")
Profile = Literal["quick", "full"]

PROFILE: Profile = "full" if os.environ.get("HOLDFAST_ASV") == "full" else "quick"
"""`quick` takes less than five minutes in all; HOLDFAST_ASV=full measures more sizes, ranks and backends."""

SAMPLE_SECONDS = 0.02
"""What a sample takes, about."""


def profile(quick: T, full: T) -> T:
    """What the profile in use measures."""
    return full if PROFILE == "full" else quick


def need(contestant: str) -> None:
    """Raise NotImplementedError, which asv takes for "skip" in a setup, if the contestant cannot run here."""
    if (reason := missing(contestant)) is not None:
        raise NotImplementedError(reason)


class Ranks:
    """The groups of ranks of this process, each started at its first use."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], ContestantGroup] = {}
        self._workloads: dict[tuple[str, int, int], Collective] = {}

    def group(self, contestant: str, ranks: int) -> ContestantGroup:
        """The running group; starts it if needed. Raises NotImplementedError if it cannot run here."""
        need(contestant)
        if not self._groups:
            atexit.register(self.close)
        if (contestant, ranks) not in self._groups:
            self._groups[contestant, ranks] = ContestantGroup(contestant, ranks)
        return self._groups[contestant, ranks]

    def seconds(self, contestant: str, op: str, ranks: int, nbytes: int, times: int) -> float:
        """One sample: the median of `times` ops, each that of its slowest rank; results are checked.

        Raises ArithmeticError for a wrong result, NotImplementedError for an op that the library has not.
        """
        library = TimedLibrary(self.group(contestant, ranks), singles=times)
        plan = BenchPlan((op,), (contestant,), (), (ranks,), (nbytes,))
        workload = self._workloads.setdefault((op, ranks, nbytes), Collective(plan, OPERATIONS[op], nbytes, ranks))
        turn = workload.turn(library, 0)
        if turn.wrong:
            raise ArithmeticError(f"{turn.wrong} elements of {op} over {contestant} came out wrong")
        return statistics.median(turn.seconds["single"])

    def close(self) -> None:
        """End all ranks."""
        while self._groups:
            self._groups.popitem()[1].close()


RANKS = Ranks()


class RankClock:
    """A timer for asv that returns what the ranks measured, not how long it took to ask them."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = RankClock()


class RankTimed:
    """The base of benchmarks that other processes time: their `timer` shows what these measured."""

    timer = CLOCK
    number = 1
    rounds = 1
    warmup_time = 0
    min_run_count = 1


class RankTimes(RankTimed, ABC):
    """The base of benchmarks of ops: the seconds of the slowest rank. It is abstract so that asv passes it over."""

    @property
    @abstractmethod
    def params(self) -> tuple[list[Any], ...]:
        """The backends, ops, numbers of ranks, and sizes if the ops have some."""

    repeat = (7, profile(9, 25), profile(1.5, 8.0))
    timeout = 120

    def setup(self, backend: str, op: str, ranks: int, size: int = 0) -> None:
        """Start the ranks and find out how many ops make a sample. Raises NotImplementedError to skip."""
        try:
            once = RANKS.seconds(f"holdfast:{backend}", op, ranks, size, 3)
        except WorkerFailed as error:
            raise NotImplementedError(str(error)) from error
        self.times = min(2000, max(3, int(SAMPLE_SECONDS / max(once, 1e-6))))

    def time_op(self, backend: str, op: str, ranks: int, size: int = 0) -> None:
        self.timer.advance(RANKS.seconds(f"holdfast:{backend}", op, ranks, size, self.times))
