"""Runs a bench: at each size the libraries take short turns, round after round, so that noise hits all alike.

During the turn of one library the ranks of the others are blocked in a read and use no CPU. The order within a round
moves by one each time, so that no library always follows the same other one.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from holdfast.ft.console.units import counted
from holdfast.harness.bench.collectives.contestants import MEMCPY, ContestantLauncher, RunningContestant, missing
from holdfast.harness.bench.collectives.definitions import OPERATIONS, SIZELESS, SMALL, Operation
from holdfast.harness.bench.collectives.failure import ContestantFailed, OpFailed
from holdfast.harness.bench.collectives.wire import Measure, Measurement
from holdfast.harness.bench.output.noise import Noise
from holdfast.harness.bench.output.results import Bench, BenchRow, Machine, OpFailure, Timing, ratios

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

    Each library has `seconds` of timing at each size, spread over `rounds` turns; `iterations` fixes the
    ops timed one by one in a turn instead. `fresh`: ranks write their inputs anew before each op, in the time taken.
    """

    operations: tuple[str, ...]
    contestants: tuple[str, ...]
    ours: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    rounds: int = 5
    seconds: float = 1.0
    iterations: int | None = None
    fresh: bool = False
    command: str = ""


@dataclass(slots=True)
class TimedLibrary:
    """A library at one op and size: how it is timed there, and its timings."""

    group: RunningContestant
    singles: int = 1
    blocks: int = 0
    block: int = 1
    single_seconds: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    wrong: int | None = 0


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


class Contest:
    """One op at one size for all libraries with the same number of ranks."""

    def __init__(self, plan: BenchPlan, operation: Operation, nbytes: int, ranks: int) -> None:
        self.plan, self.operation, self.ranks = plan, operation, ranks
        self.dtype = operation.dtype or plan.dtype
        itemsize = np.dtype(self.dtype).itemsize
        self.c = operation.block(nbytes, itemsize, ranks)
        self.nbytes = operation.nbytes(self.c, itemsize, ranks)
        self._seed = 0

    def turn(self, entry: TimedLibrary) -> tuple[list[float], list[float]]:
        """One turn of a library: seconds of its ops one by one, and of its blocks."""
        self._seed += 2
        name, c = self.operation.name, self.c
        if entry.group.contestant == MEMCPY:
            name, c = "copy", self.nbytes // np.dtype(self.dtype).itemsize
        order = Measure(name, c, self.dtype, self._seed, entry.singles, entry.blocks, entry.block, self.plan.fresh)
        answers = entry.group.measure(order, LONGEST_TURN)
        for wrong in [answer.wrong for answer in answers] + [_early(answers) if name == "barrier" else 0]:
            entry.wrong = None if entry.wrong is None or wrong is None else entry.wrong + wrong
        return _slowest(answers, blocks=False), _slowest(answers, blocks=True)

    def calibrate(self, entry: TimedLibrary) -> None:
        """Find out how many ops fill a library's turn, with an untimed turn that also warms it up."""
        entry.singles = 5
        estimate = max(statistics.median(self.turn(entry)[0]), 1e-6)
        turn = self.plan.seconds / self.plan.rounds
        if self.nbytes <= SMALL:
            entry.block = int(min(256, self.operation.in_a_row(self.ranks), max(4, math.ceil(1e-3 / estimate))))
            entry.singles = self.plan.iterations or min(1000, max(3, int(turn / 2 / estimate)))
            entry.blocks = min(200, max(3, int(turn / 2 / (estimate * entry.block))))
        else:
            entry.singles = self.plan.iterations or min(1000, max(3, int(turn / estimate)))

    def row(self, entry: TimedLibrary) -> BenchRow:
        single = Timing.of(entry.single_seconds, 1)
        timing = Timing.of(entry.block_seconds, entry.block) if entry.block_seconds else single
        algbw = self.nbytes / timing.p50 / 1e3
        return BenchRow(
            op=self.operation.name,
            ranks=self.ranks,
            contestant=entry.group.contestant,
            nbytes=self.nbytes,
            dtype=self.dtype,
            timing=timing,
            single=single,
            turns=tuple(entry.turns),
            algbw=algbw,
            busbw=algbw * self.operation.bus_factor(self.ranks),
            wrong=entry.wrong,
        )


def _compete(
    contest: Contest, groups: list[RunningContestant], launcher: ContestantLauncher
) -> tuple[list[BenchRow], list[OpFailure], list[OpFailure]]:
    """All rounds of one op at one size: rows, failures, and libraries that do not have the op.

    A library that fails is left out; one that is broken leaves `groups`.
    """
    failures: list[OpFailure] = []
    unmeasured: list[OpFailure] = []
    entries = [TimedLibrary(group) for group in groups]

    def attempt(entry: TimedLibrary, body: Callable[[TimedLibrary], object]) -> None:
        try:
            body(entry)
        except (NotImplementedError, OpFailed, ContestantFailed) as error:
            (unmeasured if isinstance(error, NotImplementedError) else failures).append(
                OpFailure(contest.operation.name, contest.ranks, entry.group.contestant, contest.nbytes, str(error))
            )
            entries.remove(entry)
            if isinstance(error, ContestantFailed):
                groups.remove(entry.group)
                launcher.drop(entry.group)

    def timed(entry: TimedLibrary) -> None:
        singles, blocks = contest.turn(entry)
        entry.single_seconds += singles
        entry.block_seconds += blocks
        entry.turns.append(1e6 * (statistics.median(blocks) / entry.block if blocks else statistics.median(singles)))

    for entry in tuple(entries):
        attempt(entry, contest.calibrate)
    for number in range(contest.plan.rounds):
        first = number % max(1, len(entries))
        for entry in entries[first:] + entries[:first]:
            attempt(entry, timed)
    return [contest.row(entry) for entry in entries], failures, unmeasured


def machine(noise: Noise) -> Machine:
    """This machine, and how much of it other processes used."""
    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return Machine(
        processor=model,
        cpus=os.cpu_count() or 1,
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        others=noise.cpus(),
    )


def _start(
    plan: BenchPlan, ranks: int, launcher: ContestantLauncher, skipped: dict[str, str]
) -> list[RunningContestant]:
    groups: list[RunningContestant] = []
    for contestant in plan.contestants:
        if contestant in skipped:
            continue
        try:
            groups.append(launcher.start(contestant, ranks))
        except ContestantFailed as error:
            skipped[contestant] = str(error)
    return groups


def expected_seconds(plan: BenchPlan) -> float:
    """An estimate of the run time: timing, as much again for warm-up and checks, and the starts."""
    measured = sum(1 if OPERATIONS[name].layout in SIZELESS else len(plan.sizes) for name in plan.operations)
    return (2 * plan.seconds * measured + START_SECONDS) * len(plan.contestants) * len(plan.ranks)


def run(plan: BenchPlan, progress: Progress = lambda text: None) -> Bench:
    """Run the whole plan.

    Libraries that cannot run here, or cannot start, are in `skipped` with the reason.
    """
    noise = Noise()
    skipped = {name: reason for name in plan.contestants if (reason := missing(name)) is not None}
    taking_part: dict[str, str] = {}
    rows: list[BenchRow] = []
    failures: list[OpFailure] = []
    unmeasured: list[OpFailure] = []
    with ContestantLauncher() as launcher:
        for ranks in plan.ranks:
            names = [name for name in plan.contestants if name not in skipped]
            progress(f"starting {counted(ranks, 'rank')} of {', '.join(names)}")
            with launcher.groups():
                groups = _start(plan, ranks, launcher, skipped)
                taking_part |= {f"{group.contestant}, {counted(ranks, 'rank')}": group.detail for group in groups}
                for name in plan.operations:
                    operation = OPERATIONS[name]
                    for size in plan.sizes if operation.layout not in SIZELESS else (0,):
                        contest = Contest(plan, operation, size, ranks)
                        progress(f"{name}, {counted(ranks, 'rank')}, {contest.nbytes} bytes")
                        done, failed, without = _compete(contest, groups, launcher)
                        rows += done
                        failures += failed
                        unmeasured += without
    return Bench(
        command=plan.command,
        machine=machine(noise),
        contestants=taking_part,
        skipped=skipped,
        rows=tuple(rows),
        ratios=ratios(rows, plan.ours),
        failures=tuple(failures),
        unmeasured=tuple(unmeasured),
        fresh=plan.fresh,
    )
