"""Runs workloads: the contestants take turns, round after round, in processes that are started anew a few times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.store.data import bytes_of
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.results import FIRST_TURNS, StoreBench, StoreFailure, StoreRow, ratios
from holdfast.harness.bench.store.teams import Team, TeamPlan, missing
from holdfast.harness.bench.store.workloads import DEVICE_WORKLOADS, WORKLOADS, StoreBenchWorkload
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.results import Machine
from holdfast.harness.measure.rounds import TimedTurn, take_turns, total_wrong
from holdfast.harness.measure.stats import Timing
from holdfast.harness.measure.workers import WorkerFailed

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
