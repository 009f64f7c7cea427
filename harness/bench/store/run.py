"""Runs the bench of the store: contestants take turns, in processes that are started anew a few times; its records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.store.data import bytes_of
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.workloads import (
    DEVICE_WORKLOADS,
    WORKLOADS,
    StoreBenchWorkload,
    Team,
    TeamPlan,
    missing,
)
from holdfast.harness.measure.results import (
    ContestantFailure,
    Machine,
    Noise,
    Ratio,
    Row,
    Run,
    beside,
    figures,
    show_head,
    show_time,
    wrong_in,
)
from holdfast.harness.measure.rounds import TimedTurn, take_turns, total_wrong
from holdfast.harness.measure.stats import Timing
from holdfast.harness.measure.workers import WorkerFailed

FIRST_TURNS = 3
"""The first turns after a start are set apart: a store that keeps two versions takes new memory in three of them."""


class StoreRow(Row, frozen=True, kw_only=True):
    """One figure of one contestant.

    `timing` and `turns` (of all starts) are of the later turns; `early` are the first, second and third turn after a
    start, each the median over starts (us; None where it did not give this figure). `rate` is GB/s (1e9 bytes) at
    p50. `memory` is the most private bytes that the op took in one process, where that was measured. `wrong` counts
    tensors, in all turns.
    """

    workload: str
    figure: str
    tensors: int
    early: tuple[float | None, ...]
    rate: float
    memory: int | None


class StoreRatio(Ratio, frozen=True, kw_only=True):
    """How many times as fast as `peer` holdfast was in a figure."""

    workload: str
    figure: str


class StoreFailure(ContestantFailure, frozen=True, kw_only=True):
    """A contestant that failed in a workload."""

    workload: str


class StoreBench(Run, frozen=True, kw_only=True):
    """A whole run."""

    size: int
    threads: int
    starts: int
    rounds: int
    workloads: dict[str, str]
    rows: tuple[StoreRow, ...]
    ratios: tuple[StoreRatio, ...]
    failures: tuple[StoreFailure, ...]

    @property
    def wrong(self) -> int:
        """How many tensors were wrong in all rows."""
        return wrong_in(self.rows)


def ratios(rows: Sequence[StoreRow], ours: str) -> tuple[StoreRatio, ...]:
    """Ours against every other contestant in the same figure, round by round."""
    return tuple(
        StoreRatio(workload=row.workload, figure=row.figure, peer=peer.contestant, **ratio)
        for row, peer, ratio in beside(rows, (ours,), lambda row: (row.workload, row.figure))
    )


# The run --------------------------------------------------------------------------------------------------------------


Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What to measure. Each of `starts` starts gives `rounds` turns after the first ones, which are set apart."""

    workloads: Sequence[str]
    peers: Sequence[str]
    size: int
    starts: int
    rounds: int
    threads: int
    torchstore_source: Path | None
    command: str


def run(plan: StorePlan, progress: Progress = lambda text: None) -> StoreBench:
    """Measure every workload. A contestant that fails is reported, and left out of the rest of its workload."""
    chosen = [each for each in (*WORKLOADS, *DEVICE_WORKLOADS) if each.name in plan.workloads]
    skipped = {name: reason for name in plan.peers if (reason := missing(name, plan.torchstore_source)) is not None}
    there = (HOLDFAST, *(name for name in plan.peers if name not in skipped))
    details: dict[str, str] = {}
    failures: list[StoreFailure] = []
    rows: list[StoreRow] = []
    noise = Noise(zygote_pid)
    for workload in chosen:
        names = [name for name in there if name in workload.contestants]
        rows += _measure(plan, workload, names, details, failures, progress)
    return StoreBench(
        machine=Machine.here(noise),
        command=plan.command,
        size=plan.size,
        threads=plan.threads,
        starts=plan.starts,
        rounds=plan.rounds,
        workloads={each.name: each.what for each in chosen},
        contestants=details,
        skipped=skipped,
        rows=tuple(rows),
        ratios=ratios(rows, HOLDFAST),
        failures=tuple(failures),
    )


def _measure(
    plan: StorePlan,
    workload: StoreBenchWorkload,
    names: Sequence[str],
    details: dict[str, str],
    failures: list[StoreFailure],
    progress: Progress,
) -> list[StoreRow]:
    team_plan = workload.team(plan.size, plan.threads, plan.torchstore_source)
    starts: dict[str, list[list[TimedTurn]]] = {name: [] for name in names}
    for start in range(1, plan.starts + 1):
        where = f"{workload.name}, start {start} of {plan.starts}"
        with ExitStack() as running:
            teams: dict[str, Team] = {}

            def failed(name: str, error: Exception, teams: dict[str, Team] = teams) -> None:
                failures.append(StoreFailure(workload=workload.name, contestant=name, reason=str(error)))
                if name in teams:
                    teams[name].close(gently=False)

            for name in names:
                progress(f"{where}: {name} starts")
                try:
                    teams[name] = running.enter_context(Team(name, team_plan))
                    details[name] = teams[name].detail
                except WorkerFailed as error:
                    failed(name, error)
            turns = take_turns(workload, teams, _told(FIRST_TURNS + plan.rounds, where, progress), failed)
        for name, taken in turns.items():
            starts[name].append(taken)
        names = [name for name in names if name in turns]
    return [
        row
        for figure in workload.figures
        for name, each in starts.items()
        if (row := _row(workload.name, figure, name, team_plan, each)) is not None
    ]


def _told(rounds: int, where: str, progress: Progress) -> Iterator[int]:
    for number in range(rounds):
        progress(f"{where}, turn {number + 1}")
        yield number


def _row(
    workload: str, figure: str, name: str, plan: TeamPlan, starts: Sequence[Sequence[TimedTurn]]
) -> StoreRow | None:
    """The row of a figure, from the turns of each start; None if no later turn gave it."""
    early = [_of(figure, [turns[at] for turns in starts if at < len(turns)]) for at in range(FIRST_TURNS)]
    later = [seconds for turns in starts for seconds in _of(figure, turns[FIRST_TURNS:])]
    if not later:
        return None
    timing, nbytes = Timing.of(later, 1), bytes_of(plan.tensors)
    everything = [turn for turns in starts for turn in turns]
    return StoreRow(
        workload=workload,
        figure=figure,
        contestant=name,
        nbytes=nbytes,
        tensors=len(plan.tensors),
        timing=timing,
        turns=tuple(1e6 * seconds for seconds in later),
        early=tuple(1e6 * statistics.median(seconds) if seconds else None for seconds in early),
        rate=nbytes / timing.p50 / 1e3,
        memory=max((turn.memory[figure] for turn in everything if figure in turn.memory), default=None),
        wrong=total_wrong(turn.wrong for turn in everything),
    )


def _of(figure: str, turns: Sequence[TimedTurn]) -> list[float]:
    return [seconds for turn in turns for seconds in turn.seconds.get(figure, ())]


# On a terminal --------------------------------------------------------------------------------------------------------


CAPTION = (
    f"p50, min and p99 of the turns after the first {FIRST_TURNS} of each start, which stand by themselves; "
    "speed-up: how many times as fast holdfast is, median, least and most over the rounds"
)

EARLY = ("first", "second", "third")


def _ratio(bench: StoreBench, row: StoreRow) -> StoreRatio | None:
    wanted = (row.workload, row.figure, row.contestant)
    return next((each for each in bench.ratios if (each.workload, each.figure, each.peer) == wanted), None)


def _speed_up(ratio: StoreRatio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.3g}x ({ratio.least:.3g} to {ratio.most:.3g})"


def _times(row: StoreRow) -> list[str]:
    times = (row.timing.p50, row.timing.min, row.timing.p99, *row.early)
    return ["" if each is None else show_time(each) for each in times]


def heading(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> str:
    """The title of a workload's table: what it is, and its state."""
    state = f"{counted(rows[0].tensors, 'tensor')}, {format_bytes(rows[0].nbytes)}"
    return f"{workload}: {bench.workloads[workload]}; {state}"


def threads_of(bench: StoreBench) -> str:
    """How many threads torch had in each process, to be put behind the machine."""
    return f", {counted(bench.threads, 'thread')}"


def show(bench: StoreBench, out: Console) -> None:
    """Print the whole run."""
    show_head(bench, out, threads_of(bench))
    for workload in bench.workloads:
        rows = [row for row in bench.rows if row.workload == workload]
        if rows:
            out.print()
            out.print(table_of(bench, workload, rows))
    for failure in bench.failures:
        out.print(styled("failed", "bold red") + f": {failure.contestant}, {failure.workload}: {failure.reason}")


def table_of(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> FoldingTable:
    """The table of a workload."""
    all_right = () if any(row.wrong for row in rows) else ("#wrong",)
    table = figures(
        heading(bench, workload, rows),
        ("figure", "library", "p50", "min", "p99", *EARLY, "GB/s", "#wrong", "speed-up"),
        names=("figure", "library"),
        caption=CAPTION,
        drop=("min", "p99", *all_right, "third", "GB/s", "second", "first"),
    )
    before = None
    for row in rows:
        if before not in (None, row.figure):
            table.add_section()
        wrong = styled(row.wrong, "bold red" if row.wrong else "")
        table.add_row(
            "" if row.figure == before else row.figure,
            row.contestant,
            *_times(row),
            f"{row.rate:.3g}",
            wrong,
            _speed_up(_ratio(bench, row)),
            style="bold" if row.contestant == HOLDFAST else "",
        )
        before = row.figure
    return table
