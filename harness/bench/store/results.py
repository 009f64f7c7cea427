"""What a run measured: frozen records, and their JSON form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from holdfast.harness.measure.results import Machine
from holdfast.harness.measure.stats import Timing

FIRST_TURNS = 3
"""The first turns after a start are set apart: a store that keeps two versions takes new memory in three of them."""


class StoreRow(msgspec.Struct, frozen=True):
    """One figure of one contestant.

    `timing` and `turns` (microseconds, in the order of the rounds of all starts) are of the later turns; `first` is the
    slowest of the first three turns after a start, the median over starts. `rate` is GB/s (1e9 bytes) at p50. `memory`
    is the most private bytes that the op took in one process, where that was measured. `wrong` counts tensors that came
    out wrong, in all turns.
    """

    workload: str
    figure: str
    contestant: str
    nbytes: int
    tensors: int
    timing: Timing
    turns: tuple[float, ...]
    first: float
    rate: float
    memory: int | None
    wrong: int


class StoreRatio(msgspec.Struct, frozen=True):
    """How many times as fast as `peer` holdfast was: the median, the least and the most over rounds."""

    workload: str
    figure: str
    peer: str
    median: float
    least: float
    most: float


class GoalResult(msgspec.Struct, frozen=True):
    """What was to be reached, in words, and what was."""

    workload: str
    figure: str
    goal: str
    reached: str
    met: bool


class StoreFailure(msgspec.Struct, frozen=True):
    """A contestant that failed in a workload."""

    workload: str
    contestant: str
    reason: str


class StoreBench(msgspec.Struct, frozen=True):
    """A whole run."""

    machine: Machine
    command: str
    size: int
    threads: int
    starts: int
    rounds: int
    workloads: dict[str, str]
    contestants: dict[str, str]
    skipped: dict[str, str]
    rows: tuple[StoreRow, ...]
    ratios: tuple[StoreRatio, ...]
    goals: tuple[GoalResult, ...]
    failures: tuple[StoreFailure, ...]

    @property
    def wrong(self) -> int:
        """How many tensors were wrong in all rows."""
        return sum(row.wrong for row in self.rows)

    def json(self) -> str:
        """This bench as JSON, indented by two spaces."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def ratios(rows: Sequence[StoreRow], ours: str) -> tuple[StoreRatio, ...]:
    """Ours against every other contestant in the same figure, round by round."""
    mine = {(row.workload, row.figure): row for row in rows if row.contestant == ours}
    found = []
    for row in rows:
        own = mine.get((row.workload, row.figure))
        if row.contestant == ours or own is None:
            continue
        rounds = [theirs / ours for theirs, ours in zip(row.turns, own.turns, strict=False)]
        found.append(
            StoreRatio(row.workload, row.figure, row.contestant, statistics.median(rounds), min(rounds), max(rounds))
        )
    return tuple(found)
