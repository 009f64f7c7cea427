"""The content of a report. All times are seconds since the run began."""

from __future__ import annotations

from typing import Literal

import msgspec

Tone = Literal["plain", "good", "bad"]
Fate = Literal["finished", "killed", "lost"]


class Figure(msgspec.Struct, frozen=True):
    """A key figure: a large value, what it is, and a small note."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


class Point(msgspec.Struct, frozen=True):
    """A reward after so many committed steps."""

    steps: int
    value: float


class Curve(msgspec.Struct, frozen=True):
    """The learning curve: the mean reward of each step's samples, and that of greedy answers to held-out prompts."""

    rewards: tuple[Point, ...]
    evaluations: tuple[Point, ...]


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


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, and the recovery from it: one that was injected, or a loss that the run saw.

    `time` is None if its moment never came (`when` says which), or if it was `refused`. `step`: so many steps were
    committed before it. An injected one has the `number` and the `type` of the schedule.
    """

    words: str
    victims: tuple[str, ...]
    time: float | None
    step: int
    stages: tuple[RecoveryStage, ...] = ()
    number: int = 0
    type: str = ""
    when: str = ""
    healed: float | None = None
    refused: str = ""
    note: str = ""

    @property
    def at(self) -> float:
        """The time of a fault that came."""
        assert self.time is not None, self
        return self.time

    @property
    def target(self) -> str:
        """The processes that it hit."""
        return ", ".join(self.victims)


class Bar(msgspec.Struct, frozen=True):
    """A bar of a histogram: what it counts, and how many."""

    label: str
    count: int


class RoleUse(msgspec.Struct, frozen=True):
    """The work of a role: the share of its processes' time that they worked, and the seconds that they waited."""

    role: str
    processes: int
    busy: float
    idle_seconds: float


class ProcessorUse(msgspec.Struct, frozen=True):
    """The processor seconds of a role in the steady state of a run.

    They are given for each kind of its work, the model's first. `other` is what no kind of work has: calls between
    processes, waiting, and holdfast's own threads.
    """

    role: str
    seconds: float
    work: tuple[tuple[str, float], ...]
    other: float


class RateSample(msgspec.Struct, frozen=True):
    """A rate per second, averaged around a moment."""

    time: float
    value: float


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of reinforcement learning learnt, and how its roles worked.

    `staleness` counts groups by the versions that they were behind, `latencies` versions by the time from publication
    to a generator that served them; `tokens` is the rate at which policy tokens were trained on. `model_share` is the
    share of all processor time that the model had: forward and backward, generation and the optimizer. Processor time
    is counted from step `steady_from` on.
    """

    curve: Curve
    staleness: tuple[Bar, ...] = ()
    latencies: tuple[Bar, ...] = ()
    uses: tuple[RoleUse, ...] = ()
    processor: tuple[ProcessorUse, ...] = ()
    model_share: float | None = None
    steady_from: int = 0
    tokens: tuple[RateSample, ...] = ()


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `outcome` is what came of it, `good` whether that is well; `summary` is a sentence or two.

    `faults` are those that came.
    """

    title: str
    good: bool
    outcome: str
    summary: str
    when: str
    seconds: float
    figures: tuple[Figure, ...]
    learning: Learning | None
    lanes: tuple[ProcessRecord, ...]
    spans: tuple[Span, ...]
    faults: tuple[FaultRecord, ...]
    configuration: tuple[tuple[str, str], ...]
    repeat: tuple[str, ...]
    seed: int | None = None
