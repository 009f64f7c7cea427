"""What the benchmarks share: profiles, and rank processes that stay alive from sample to sample.

asv runs each benchmark, with each combination of its parameters, in a process of its own. The ranks are started once
in it, by the first sample that needs them, and are asleep between samples. They are told to stop when the process ends,
and end by themselves if it was killed: their socket to it is then closed.
"""

from __future__ import annotations

import atexit
import itertools
import os
import statistics
from typing import Literal, TypeVar

import numpy as np

from holdfast.harness.bench.collectives.contestants import ContestantLauncher, RunningContestant, missing
from holdfast.harness.bench.collectives.definitions import OPERATIONS
from holdfast.harness.bench.collectives.failure import ContestantFailed
from holdfast.harness.bench.collectives.wire import Measure

T = TypeVar("T")
Profile = Literal["quick", "full"]

PROFILE: Profile = "full" if os.environ.get("HOLDFAST_ASV") == "full" else "quick"
"""`quick` takes less than five minutes in all; HOLDFAST_ASV=full measures more sizes, ranks and backends."""

SAMPLE_SECONDS = 0.02
"""What a sample takes, about."""


def profile(quick: T, full: T) -> T:
    """What the profile in use measures."""
    return full if PROFILE == "full" else quick


def need(*contestants: str) -> None:
    """Raise NotImplementedError, which asv takes for "skip" in a setup, if a contestant cannot run here."""
    for name in contestants:
        if (reason := missing(name)) is not None:
            raise NotImplementedError(reason)


class Ranks:
    """The groups of ranks of this process, each started at its first use."""

    def __init__(self) -> None:
        self._launcher: ContestantLauncher | None = None
        self._groups: dict[tuple[str, int], RunningContestant] = {}
        self._seeds = itertools.count(0, 2)

    def group(self, contestant: str, ranks: int) -> RunningContestant:
        """The running group; starts it if needed. Raises NotImplementedError if it cannot run here."""
        need(contestant)
        if self._launcher is None:
            self._launcher = ContestantLauncher()
            atexit.register(self.close)
        if (contestant, ranks) not in self._groups:
            self._groups[contestant, ranks] = self._launcher.start(contestant, ranks)
        return self._groups[contestant, ranks]

    def seconds(self, contestant: str, op: str, ranks: int, nbytes: int, times: int) -> float:
        """One sample: the median of `times` ops, each that of its slowest rank; results are checked.

        Raises ArithmeticError for a wrong result, NotImplementedError for an op that the library has not.
        """
        operation = OPERATIONS[op]
        dtype = operation.dtype or "float32"
        count = operation.block(nbytes, np.dtype(dtype).itemsize, ranks)
        order = Measure(op, count, dtype, next(self._seeds), times, 0, 1)
        answers = self.group(contestant, ranks).measure(order, 60.0)
        if wrong := sum(answer.wrong or 0 for answer in answers):
            raise ArithmeticError(f"{wrong} elements of {op} over {contestant} came out wrong")
        slowest = [max(end - start for start, end in each) for each in zip(*(a.singles for a in answers), strict=True)]
        return float(statistics.median(slowest)) / 1e9

    def close(self) -> None:
        """End all ranks."""
        if self._launcher is not None:
            self._launcher.__exit__(None, None, None)
            self._launcher = None
            self._groups = {}


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


class RankTimes:
    """The base of benchmarks that ranks sample: the slowest rank times an op."""

    timer = CLOCK
    number = 1
    rounds = 1
    warmup_time = 0
    repeat = (7, profile(9, 25), profile(1.5, 8.0))
    min_run_count = 1
    timeout = 120

    def ready(self, contestant: str, op: str, ranks: int, nbytes: int) -> int:
        """Start the ranks and find out how many ops make a sample. Raises NotImplementedError to skip."""
        try:
            once = RANKS.seconds(contestant, op, ranks, nbytes, 3)
        except ContestantFailed as error:
            raise NotImplementedError(str(error)) from error
        return min(2000, max(3, int(SAMPLE_SECONDS / max(once, 1e-6))))
