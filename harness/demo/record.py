"""The data of a finished demo run, frozen and serialisable, for its report.

All times are seconds since the run began (when the first process was started); durations are seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.harness.invariants import CheckResult
from holdfast.harness.report.model import RecoveryStage
from holdfast.rl.crew import Crew
from holdfast.rl.learning.recipe import Recipe

Victim = Literal["trainer", "generator", "holder"]


class Step(msgspec.Struct, frozen=True):
    """A committed step: the time of the commit, the mean reward of its samples, and the trainers' view then.

    `tokens` were generated for it; `ranks` trained on it.
    """

    step: int
    time: float
    reward: float
    tokens: int
    epoch: int
    ranks: int


class Evaluation(msgspec.Struct, frozen=True):
    """The held-out exact match of the weights after `version` steps."""

    version: int
    time: float
    exact_match: float


class ProcessLife(msgspec.Struct, frozen=True):
    """A process, from its start to its end. `ended` is None if it lived to the end of the run.

    `how` says how it ended if it was lost. `replaces` names the dead process that it replaces.
    """

    name: str
    role: str
    pid: int
    started: float
    ended: float | None = None
    how: str = ""
    replaces: str = ""


class StepSpan(msgspec.Struct, frozen=True):
    """The activity of a process from `start` to `end`, for a `step` (or, for weights, a version).

    `activity` is one of `holdfast.rl.diary.Activity`, or "reduce", or "rebuild".
    """

    process: str
    activity: str
    start: float
    end: float
    step: int


class DemoFault(msgspec.Struct, frozen=True):
    """An injected fault: the process, what it was doing, the step, and the time.

    `stages` in order of time: for a trainer detected, rebuilt, next step committed; for the others detected, replaced,
    and the lost work or replica restored.
    """

    victim: Victim
    process: str
    pid: int
    where: str
    step: int
    time: float
    stages: tuple[RecoveryStage, ...]


class LogLine(msgspec.Struct, frozen=True):
    """A line of the run's log, as displayed."""

    time: float
    process: str
    text: str


class RunOutcome(msgspec.Struct, frozen=True):
    """The verdict.

    Rates are held-out exact match: of random weights, after the warm-up, and at the end (the mean of the last
    evaluations). `digest` is that of the final weights, `verified` that of a run without faults, if there was one.
    `too_short` runs need not have learned. `failures` says why the run did not pass.
    """

    untrained: float
    before: float
    after: float
    digest: str
    verified: str | None
    steps_lost: int
    versions_lost: int
    too_short: bool
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the run has no failures."""
        return not self.failures


class DemoRun(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    backend: str
    began: str
    """Date and time of the start, ISO 8601."""
    seconds: float
    setup_seconds: float
    """Seconds from the start of the command to that of the run, mostly imports."""
    recipe: Recipe
    crew: Crew
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    lives: tuple[ProcessLife, ...]
    spans: tuple[StepSpan, ...]
    blows: tuple[DemoFault, ...]
    notes: tuple[LogLine, ...]
    findings: tuple[CheckResult, ...]
    """What each invariant's checker found in the event logs."""
    outcome: RunOutcome

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens that were trained on, by the time from the first step's end to the last's."""
        if len(self.steps) < 2:
            return 0.0
        first, last = self.steps[0], self.steps[-1]
        return sum(step.tokens for step in self.steps[1:]) / max(last.time - first.time, 1e-9)

    @property
    def step_seconds(self) -> float:
        """The median time from a step's commit to the next."""
        gaps = sorted(b.time - a.time for a, b in zip(self.steps, self.steps[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps else 0.0
