"""The content of a report. All times are seconds since the run began."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.harness.invariants import CheckResult

Tone = Literal["plain", "good", "bad"]
Fate = Literal["finished", "killed", "lost"]


class Figure(msgspec.Struct, frozen=True):
    """A key figure: a large value, what it is, and a small note."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


class Point(msgspec.Struct, frozen=True):
    """A rate (0 to 1) after so many committed steps."""

    steps: int
    value: float


class Curve(msgspec.Struct, frozen=True):
    """The learning curve: the mean reward of each step's samples, and exact match on held-out prompts.

    `untrained` is the held-out rate before the supervised warm-up of `warmup_steps` steps, which comes first. The
    headline is the mean of the last `averaged` evaluations.
    """

    rewards: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    averaged: int = 1
    untrained: float | None = None
    warmup_steps: int = 0


class Span(msgspec.Struct, frozen=True):
    """What a process did from `start` to `end`. The activity chooses the colour; `label` is a step or version."""

    process: str
    activity: str
    start: float
    end: float
    label: str = ""


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process, from its start to its end."""

    name: str
    role: str
    pid: int
    born: float
    ended: float
    fate: Fate
    note: str = ""


class RecoveryStage(msgspec.Struct, frozen=True):
    """A stage of a recovery, and how many seconds after the fault it was reached."""

    name: str
    seconds: float


class ReportedFault(msgspec.Struct, frozen=True):
    """An injected fault: its title, its target, the committed steps before it, and its stages by time."""

    time: float
    title: str
    target: str
    steps: int
    stages: tuple[RecoveryStage, ...]
    note: str = ""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `summary` is one or two sentences; `when` a date in words; `failures` why it is not `good`."""

    title: str
    good: bool
    summary: str
    when: str
    seconds: float
    figures: tuple[Figure, ...]
    curve: Curve
    lanes: tuple[ProcessRecord, ...]
    spans: tuple[Span, ...]
    faults: tuple[ReportedFault, ...]
    findings: tuple[CheckResult, ...]
    configuration: tuple[tuple[str, str], ...]
    repeat: tuple[str, ...]
    failures: tuple[str, ...] = ()
