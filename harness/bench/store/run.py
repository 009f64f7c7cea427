"""Runs workloads: the contestants take turns, round after round, in processes that are started anew a few times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.store.data import bytes_of
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.goals import judge
from holdfast.harness.bench.store.results import FIRST_TURNS, StoreBench, StoreFailure, StoreRow, ratios
from holdfast.harness.bench.store.team_plan import TeamPlan
from holdfast.harness.bench.store.teams import Team, WorkerFailed, missing
from holdfast.harness.bench.store.workloads import WORKLOADS, BenchWorkload
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.results import Machine
from holdfast.harness.measure.stats import Timing

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


class _Turns:
    """What the turns of one contestant in one workload gave, by start."""

    def __init__(self) -> None:
        self.seconds: list[list[dict[str, float]]] = []
        self.memory: dict[str, int] = {}
        self.wrong = 0


def run(plan: StorePlan, progress: Progress = lambda text: None) -> StoreBench:
    """Measure every workload. A contestant that fails is reported, and left out of the rest of its workload."""
    chosen = [each for each in WORKLOADS if each.name in plan.workloads]
    skipped = {name: reason for name in plan.peers if (reason := missing(name, plan.torchstore_source)) is not None}
    there = (HOLDFAST, *(name for name in plan.peers if name not in skipped))
    details: dict[str, str] = {}
    failures: list[StoreFailure] = []
    rows: list[StoreRow] = []
    noise = Noise(zygote_pid)
    for workload in chosen:
        names = [name for name in there if name in workload.contestants]
        rows += _measure(plan, workload, names, details, failures, progress)
    found = ratios(rows, HOLDFAST)
    ours = {(row.workload, row.figure): row for row in rows if row.contestant == HOLDFAST}
    by_peer = {(each.workload, each.figure, each.peer): each for each in found}
    judged = (judge(each.name, goal, ours, by_peer) for each in chosen for goal in each.goals)
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
        ratios=found,
        goals=tuple(each for each in judged if each is not None),
        failures=tuple(failures),
    )


def _measure(
    plan: StorePlan,
    workload: BenchWorkload,
    names: Sequence[str],
    details: dict[str, str],
    failures: list[StoreFailure],
    progress: Progress,
) -> list[StoreRow]:
    tensors = workload.shapes(plan.size)
    turns: dict[str, _Turns] = defaultdict(_Turns)
    nbytes = bytes_of(tensors)
    team_plan = TeamPlan(
        workload.publishers,
        workload.readers,
        workload.holders,
        workload.replicas,
        nbytes,
        plan.threads,
        plan.torchstore_source,
        workload.apart,
    )
    for start in range(plan.starts):
        with ExitStack() as running:
            teams: dict[str, Team] = {}

            def drop(name: str, error: Exception, teams: dict[str, Team] = teams) -> None:
                failures.append(StoreFailure(workload.name, name, str(error)))
                if name in teams:
                    teams.pop(name).close(gently=False)

            for name in names:
                progress(f"{workload.name}, start {start + 1} of {plan.starts}: {name} starts")
                try:
                    teams[name] = running.enter_context(Team(name, team_plan))
                    teams[name].prepare(tensors, workload.sharded)
                    details[name] = teams[name].detail
                    turns[name].seconds.append([])
                except WorkerFailed as error:
                    drop(name, error)
            for turn in range(FIRST_TURNS + plan.rounds):
                progress(f"{workload.name}, start {start + 1} of {plan.starts}, turn {turn + 1}")
                order = list(teams)
                for name in order[turn % len(order) :] + order[: turn % len(order)] if order else ():
                    try:
                        taken = workload.turn(teams[name], turn + 1)
                    except WorkerFailed as error:
                        drop(name, error)
                        continue
                    turns[name].seconds[-1].append(dict(taken.seconds))
                    turns[name].wrong += taken.wrong
                    for figure, memory in taken.memory.items():
                        turns[name].memory[figure] = max(memory, turns[name].memory.get(figure, 0))
        names = [name for name in names if name in teams]
    return [
        row
        for figure in workload.figures
        for name, each in turns.items()
        if (row := _row(workload.name, figure, name, nbytes, len(tensors), each)) is not None
    ]


def _row(workload: str, figure: str, name: str, nbytes: int, tensors: int, turns: _Turns) -> StoreRow | None:
    """The row of a figure; None if no later turn gave it."""
    first = [max(early) for start in turns.seconds if (early := _of(figure, start[:FIRST_TURNS]))]
    later = [seconds for start in turns.seconds for seconds in _of(figure, start[FIRST_TURNS:])]
    if not later:
        return None
    timing = Timing.of(later, 1)
    return StoreRow(
        workload=workload,
        figure=figure,
        contestant=name,
        nbytes=nbytes,
        tensors=tensors,
        timing=timing,
        turns=tuple(1e6 * seconds for seconds in later),
        first=1e6 * statistics.median(first) if first else timing.p50,
        rate=nbytes / timing.p50 / 1e3,
        memory=turns.memory.get(figure),
        wrong=turns.wrong,
    )


def _of(figure: str, turns: Sequence[dict[str, float]]) -> list[float]:
    return [turn[figure] for turn in turns if figure in turn]
