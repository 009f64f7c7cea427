"""Records a run from its events, for its final record and its display."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from holdfast.harness.demo.faults import ReplicasRestored, WorkerKilled
from holdfast.harness.demo.record import Evaluation, LogLine, ProcessLife, Step
from holdfast.rl.happenings import (
    Evaluated,
    Happening,
    Published,
    StepCommitted,
    TrainerFinished,
    UnitDone,
    WarmedUp,
    WorkerLost,
    WorkerStarted,
)


@dataclass(slots=True)
class RunRecorder:
    """The run so far. `began` is on `time.monotonic()`; all other times count from it."""

    began: float = field(default_factory=time.monotonic)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    lives: dict[str, ProcessLife] = field(default_factory=dict)
    notes: list[LogLine] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    untrained: float = 0.0
    version: int = -1
    stored: dict[int, str] = field(default_factory=dict)
    """The digests of evaluated versions, as read from the store."""

    def note(self, at: float, process: str, text: str) -> None:
        """Add a line to the log; `at` is on `time.monotonic()`."""
        self.notes.append(LogLine(at - self.began, process, text))

    def hear(self, happening: Happening) -> None:
        """Record an event of the run."""
        at = happening.time - self.began
        match happening:
            case StepCommitted():
                self.steps.append(
                    Step(happening.step, at, happening.reward, happening.tokens, happening.epoch, happening.size)
                )
                return
            case Published():
                self.version = happening.version
                return
            case UnitDone():
                self._unit_done(happening)
                return
            case Evaluated():
                self.evaluations.append(Evaluation(happening.version, at, happening.exact_match))
                self.stored[happening.version] = happening.digest
                return
            case WarmedUp():
                self.untrained = happening.untrained
                text = f"supervised warm-up, before any reinforcement, is done: loss {happening.loss:.2f}"
                self.note(happening.time, "driver", f"{text}; held-out exact match before it {happening.untrained:.1%}")
            case WorkerStarted():
                self.lives[happening.name] = ProcessLife(
                    happening.name, happening.role, happening.pid, at, replaces=happening.replaces
                )
                if happening.replaces:
                    self.note(happening.time, happening.name, f"started in place of {happening.replaces}")
            case WorkerLost():
                self._lost(happening, at)
            case WorkerKilled():
                self.note(happening.time, happening.process, f"killed with SIGKILL, {happening.where}")
            case ReplicasRestored():
                who = ", ".join(happening.holders)
                self.note(happening.time, "store", f"version {happening.version} is replicated again, by {who}")
            case TrainerFinished():
                self.note(happening.time, happening.worker, f"has committed all steps; weights {happening.digest[:12]}")
        self.happenings.append(happening)

    def _lost(self, lost: WorkerLost, at: float) -> None:
        life = self.lives[lost.name]
        self.lives[lost.name] = ProcessLife(life.name, life.role, life.pid, life.started, at, lost.how, life.replaces)
        text = f"is gone: {lost.how.splitlines()[0]}"
        if lost.requeued:
            text += f"; {len(lost.requeued)} unit back in the queue"
        self.note(lost.time, lost.name, text)

    def _unit_done(self, done: UnitDone) -> None:
        """Keep the first result of a unit that ran twice after a requeue."""
        for happening in self.happenings:
            if isinstance(happening, WorkerLost) and done.unit in happening.requeued:
                self.happenings.append(done)
                self.note(done.time, done.worker, f"has redone unit {done.unit.number} of step {done.unit.step}")
                return
