"""Starts fresh pairs of processes, one of each side, and lets them take turns."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.launch.held_directory import HeldDirectory, private_file
from holdfast.harness.gate import arm, workloads
from holdfast.harness.gate.arm import SideOrder
from holdfast.harness.gate.sides import Side, free_cpu
from holdfast.harness.gate.workloads import WORKLOADS, GateWorkload
from holdfast.harness.measure.rounds import TimedTurn, Workload, mirrored, take_turns
from holdfast.harness.measure.workers import HeldProcess, Place, StartedWorker, Worker, WorkerFailed, WorkerGroup, call

ANSWER_SECONDS = 60.0
FEWEST_GROUPS, ENOUGH_SECONDS = 8, 0.4
"""On a busy machine, where turns take long, a workload gets at most so many groups after so many seconds."""


class SideFailed(HoldfastError):
    """The processes of one side did not start."""


class CannotRun(Exception):
    """The side `name` cannot run a workload: it lacks a part that the workload uses, or fails.

    `ended`: its processes are lost for other workloads, too.
    """

    def __init__(self, name: str, reason: str, ended: bool) -> None:
        super().__init__(reason)
        self.name, self.ended = name, ended


@dataclass(frozen=True, slots=True)
class RunningSide:
    """The processes of a side. `extra` 0.05 does 5% more ops, timed as if it had not."""

    side: Side
    group: WorkerGroup
    extra: float = 0.0


class Slices(Workload[RunningSide]):
    """One workload of the gate: a turn lasts milliseconds, and measures the CPU time of all ranks."""

    def __init__(self, workload: GateWorkload) -> None:
        self.name, self._workload = workload.name, workload

    def set_up(self, contestant: RunningSide) -> None:
        call(self._ranks(contestant), "prepare", self.name, into=type(None), timeout=ANSWER_SECONDS)

    def turn(self, contestant: RunningSide, number: int) -> TimedTurn:
        ops = round(self._workload.ops * (1 + contestant.extra))
        taken = call(self._ranks(contestant), "run", self.name, ops, into=int, timeout=ANSWER_SECONDS)
        return TimedTurn({"cpu": [sum(taken) / 1e9]}, wrong=None)

    def _ranks(self, contestant: RunningSide) -> Sequence[Worker]:
        return contestant.group.workers[: self._workload.ranks]


def slices(
    running: dict[str, RunningSide], workload: GateWorkload, groups: int
) -> dict[str, list[tuple[float, float]]]:
    """Run at most `groups` groups of turns, A B B A and B A A B alternating; returns CPU seconds.

    Raises `CannotRun`.
    """

    def failed(name: str, error: Exception) -> None:
        raise CannotRun(name, f"{running[name].side.title}: {error}", isinstance(error, WorkerFailed))

    turns = take_turns(Slices(workload), running, _until_enough(groups), failed, mirrored)
    seconds = {name: [turn.seconds["cpu"][0] for turn in each] for name, each in turns.items()}
    return {name: list(zip(each[::2], each[1::2], strict=True)) for name, each in seconds.items()}


def _until_enough(groups: int) -> Iterator[int]:
    enough = time.monotonic() + ENOUGH_SECONDS
    for number in range(groups):
        if number >= FEWEST_GROUPS and time.monotonic() > enough:
            return
        yield number


class PairLauncher:
    """Starts pairs by a program that has torch imported and forks all processes. A context manager."""

    def __init__(self) -> None:
        self._folder = HeldDirectory("holdfast-gate-")
        self._ranks = max(workload.ranks for workload in WORKLOADS)
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, arm.PRIORITY)
        with private_file(self._folder.path / "errors", "wb") as errors:
            self._program = subprocess.Popen(
                [sys.executable, "-P", str(arm.__file__), str(workloads.__file__), str(self._ranks)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    @contextlib.contextmanager
    def pair(self, sides: Sequence[Side]) -> Iterator[list[RunningSide]]:
        """Start the processes of each side, all on one CPU; end them with the block. Raises `SideFailed`."""
        cpu = free_cpu()
        with contextlib.ExitStack() as started:
            yield [RunningSide(side, started.enter_context(self._start(side, cpu))) for side in sides]

    def _start(self, side: Side, cpu: int) -> WorkerGroup:
        def start(place: Place) -> list[StartedWorker]:
            order = SideOrder(str(side.site), cpu, str(place.folder), str(place.output), str(place.address))
            stdin, stdout = self._program.stdin, self._program.stdout
            assert stdin is not None and stdout is not None
            try:
                stdin.write(msgspec.json.encode(order) + b"\n")
                stdin.flush()
                if not select.select([stdout], [], [], ANSWER_SECONDS)[0]:
                    raise TimeoutError
                return [HeldProcess(side.title, int(stdout.readline()))]
            except (OSError, ValueError):
                text = (self._folder.path / "errors").read_text(errors="replace").strip()
                words = text.splitlines()[-1] if text else "it said nothing"
                raise SideFailed(f"the program that forks all sides ended: {words}") from None

        try:
            group = WorkerGroup(side.title, self._ranks, start, ANSWER_SECONDS)
        except WorkerFailed as error:
            raise SideFailed(str(error)) from error
        where = Path(group.detail)
        if not where.is_relative_to(side.root.resolve()):
            group.close()
            raise SideFailed(f"a process of {side.title} runs {where}, which is not its code")
        return group

    def __enter__(self) -> PairLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._program.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.communicate(timeout=5.0)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        self._folder.close()
