"""Runs a bench: at each size the libraries take turns. Their ranks sleep in a read between their turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from holdfast.ft.console.units import counted
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.contestants import ContestantGroup, missing
from holdfast.harness.bench.drivers import MEMCPY
from holdfast.harness.bench.operations import OPERATIONS, SIZELESS, SMALL, Operation
from holdfast.harness.bench.ranks import Measure, Measurement
from holdfast.harness.bench.report import Bench, BenchRow, OpFailure, ratios
from holdfast.harness.measure.results import Machine, Noise
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns, total_wrong
from holdfast.harness.measure.stats import Timing
from holdfast.harness.measure.workers import WorkerFailed

Progress = Callable[[str], None]

START_SECONDS = 3.0
"""Roughly how long the ranks of one library take to start."""

LONGEST_TURN = 120.0
"""Seconds without an answer after which a library has failed."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. `contestants` in order; those in `ours` are compared with the rest.

    `MEMCPY` is not a library: whatever the op, each of its ranks copies S bytes in its own memory. Most ops must read
    and write that much on every rank, so it is their bound.

    Each library has `seconds` of timing at each size, spread over `rounds` turns. `fresh`: ranks write their inputs
    anew before each op, in the time taken.
    """

    operations: tuple[str, ...]
    contestants: tuple[str, ...]
    ours: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    rounds: int = 5
    seconds: float = 1.0
    fresh: bool = False
    command: str = ""


@dataclass(slots=True)
class TimedLibrary:
    """A library at one op and size: it times `singles` ops alone, and `blocks` of `block` in a row."""

    running: ContestantGroup
    singles: int = 5
    blocks: int = 0
    block: int = 1
    wrong: int | None = 0
    """Wrong elements of its warm-up."""


def _slowest(answers: Sequence[Measurement], blocks: bool) -> list[float]:
    """For each timing, the seconds of the slowest rank."""
    taken = np.array([answer.blocks if blocks else answer.singles for answer in answers], dtype=np.int64)
    if taken.size == 0:
        return []
    longest: list[float] = ((taken[:, :, 1] - taken[:, :, 0]).max(axis=0) / 1e9).tolist()
    return longest


def _early(answers: Sequence[Measurement]) -> int:
    """How many barriers a rank left before the last one had entered."""
    taken = np.array([answer.singles for answer in answers], dtype=np.int64)
    return int((taken[:, :, 1].min(axis=0) < taken[:, :, 0].max(axis=0)).sum())


class Collective(Workload[TimedLibrary]):
    """One op at one size for all libraries with the same number of ranks."""

    def __init__(self, plan: BenchPlan, operation: Operation, nbytes: int, ranks: int) -> None:
        self.plan, self.operation, self.ranks, self.name = plan, operation, ranks, operation.name
        self.dtype = operation.dtype or plan.dtype
        itemsize = np.dtype(self.dtype).itemsize
        self.c = operation.block(nbytes, itemsize, ranks)
        self.nbytes = operation.nbytes(self.c, itemsize, ranks)
        self._seed = 0

    def turn(self, contestant: TimedLibrary, number: int) -> TimedTurn:
        """Have all ranks time ops one by one ("single"), and in blocks ("block")."""
        self._seed += 2
        name, c = self.name, self.c
        if contestant.running.contestant == MEMCPY:
            name, c = "copy", self.nbytes // np.dtype(self.dtype).itemsize
        order = Measure(
            op=name,
            c=c,
            dtype=self.dtype,
            seed=self._seed,
            singles=contestant.singles,
            blocks=contestant.blocks,
            block=contestant.block,
            fresh=self.plan.fresh,
        )
        answers = contestant.running.measure(order, LONGEST_TURN)
        wrong = [answer.wrong for answer in answers] + [_early(answers) if name == "barrier" else 0]
        seconds = {"single": _slowest(answers, blocks=False), "block": _slowest(answers, blocks=True)}
        return TimedTurn(seconds, total_wrong(wrong))

    def set_up(self, contestant: TimedLibrary) -> None:
        """Find out how many ops fill a library's turn, with an untimed turn that also warms it up."""
        warm_up = self.turn(contestant, -1)
        contestant.wrong = warm_up.wrong
        estimate = max(statistics.median(warm_up.seconds["single"]), 1e-6)
        turn = self.plan.seconds / self.plan.rounds
        if self.nbytes <= SMALL:
            most = self.operation.in_a_row(self.ranks)
            contestant.block = int(min(256, most, max(4, math.ceil(1e-3 / estimate))))
            contestant.singles = min(1000, max(3, int(turn / 2 / estimate)))
            contestant.blocks = min(200, max(3, int(turn / 2 / (estimate * contestant.block))))
        else:
            contestant.singles = min(1000, max(3, int(turn / estimate)))

    def row(self, library: TimedLibrary, turns: Sequence[TimedTurn]) -> BenchRow:
        singles, blocks = ([each for turn in turns for each in turn.seconds[way]] for way in ("single", "block"))
        single = Timing.of(singles, 1)
        timing = Timing.of(blocks, library.block) if blocks else single
        way, block = ("block", library.block) if blocks else ("single", 1)
        algbw = self.nbytes / timing.p50 / 1e3
        return BenchRow(
            op=self.name,
            ranks=self.ranks,
            contestant=library.running.contestant,
            nbytes=self.nbytes,
            dtype=self.dtype,
            timing=timing,
            single=single,
            turns=tuple(1e6 * statistics.median(turn.seconds[way]) / block for turn in turns),
            algbw=algbw,
            busbw=algbw * self.operation.bus_factor(self.ranks),
            wrong=total_wrong([library.wrong, *(turn.wrong for turn in turns)]),
        )


class _Results:
    """What a run has found so far."""

    def __init__(self) -> None:
        self.contestants: dict[str, str] = {}
        self.rows: list[BenchRow] = []
        self.failures: list[OpFailure] = []
        self.unmeasured: list[OpFailure] = []

    def measure(self, workload: Collective, running: dict[str, ContestantGroup]) -> None:
        """All rounds of one op at one size. A library with a worker that fails is ended, and leaves `running`."""
        libraries = {name: TimedLibrary(each) for name, each in running.items()}

        def failed(name: str, error: Exception) -> None:
            failure = OpFailure(
                op=workload.name, ranks=workload.ranks, contestant=name, nbytes=workload.nbytes, reason=str(error)
            )
            (self.unmeasured if isinstance(error, NotImplementedError) else self.failures).append(failure)
            if isinstance(error, WorkerFailed):
                running.pop(name).close(gently=False)

        turns = take_turns(workload, libraries, range(workload.plan.rounds), failed)
        self.rows += [workload.row(libraries[name], each) for name, each in turns.items()]


def expected_seconds(plan: BenchPlan) -> float:
    """An estimate of the run time: timing, as much again for warm-up and checks, and the starts."""
    measured = sum(1 if OPERATIONS[name].layout in SIZELESS else len(plan.sizes) for name in plan.operations)
    return (2 * plan.seconds * measured + START_SECONDS) * len(plan.contestants) * len(plan.ranks)


def run(plan: BenchPlan, progress: Progress = lambda text: None) -> Bench:
    """Run the whole plan.

    Libraries that cannot run here, or cannot start, are in `skipped` with the reason.
    """
    noise, found = Noise(zygote_pid), _Results()
    skipped = {name: reason for name in plan.contestants if (reason := missing(name)) is not None}
    for ranks in plan.ranks:
        names = [name for name in plan.contestants if name not in skipped]
        progress(f"starting {counted(ranks, 'rank')} of {', '.join(names)}")
        with ExitStack() as ends:
            running: dict[str, ContestantGroup] = {}
            for name in names:
                try:
                    running[name] = ContestantGroup(name, ranks)
                    ends.callback(running[name].close)
                except WorkerFailed as error:
                    skipped[name] = str(error)
            found.contestants |= {f"{name}, {counted(ranks, 'rank')}": each.detail for name, each in running.items()}
            for name in plan.operations:
                operation = OPERATIONS[name]
                for size in plan.sizes if operation.layout not in SIZELESS else (0,):
                    workload = Collective(plan, operation, size, ranks)
                    progress(f"{name}, {counted(ranks, 'rank')}, {workload.nbytes} bytes")
                    found.measure(workload, running)
    return Bench(
        command=plan.command,
        machine=Machine.here(noise),
        contestants=found.contestants,
        skipped=skipped,
        rows=tuple(found.rows),
        ratios=ratios(found.rows, plan.ours),
        failures=tuple(found.failures),
        unmeasured=tuple(found.unmeasured),
        fresh=plan.fresh,
    )
