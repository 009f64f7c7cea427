"""What a checker is: it sees every event in order, and says which of them break its invariant.

Checkers keep no clock and do no I/O, so the same ones serve logs of real runs and a simulator, which can
look at `violations` after every event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holdfast.ft.telemetry.event import Event


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in seconds.

    `operation`: how long an op may take that names no timeout itself. `slack`: by how much a deadline may be overrun
    before it counts (the scheduler's part). `progress`: how long after a fault the next step must be committed.
    """

    operation: float = 30.0
    slack: float = 1.0
    progress: float = 30.0


class Violation(msgspec.Struct, frozen=True):
    """An invariant was broken: which, where, when, and how."""

    invariant: str
    process: str
    time: float
    message: str


class CheckResult(msgspec.Struct, frozen=True):
    """What a checker found.

    `looked` counts the events that it had something to say about: 0 proves nothing.
    """

    invariant: str
    meaning: str
    looked: int
    violations: tuple[Violation, ...]


class Checker(ABC):
    """One invariant. `name` is a word, `meaning` a sentence. `needs_simulation`: the logs of real processes never say
    enough to look at it.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    needs_simulation: ClassVar[bool] = False

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.looked = 0
        self.violations: list[Violation] = []

    @abstractmethod
    def observe(self, event: Event) -> None:
        """See the next event."""

    def finish(self) -> None:
        """There are no more events. What had to happen and did not is a violation now."""
        return

    def violated(self, event: Event, message: str) -> None:
        self.violations.append(Violation(self.name, event.process, event.time, message))

    def finding(self) -> CheckResult:
        return CheckResult(self.name, self.meaning, self.looked, tuple(self.violations))
