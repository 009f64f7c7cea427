"""The base class of checkers: sees every event in order, and reports violations of its invariant.

Checkers keep no clock and do no I/O, so the same ones serve logs of real runs and a simulator, which can
read `violations` after every event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from holdfast.ft.events import Event


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in seconds.

    `operation`: how long an op without a timeout of its own may take. `slack`: how much later than its deadline an op
    may end, because of the scheduler. `progress`: how long after a fault the next step must be committed.
    """

    operation: float = 30.0
    slack: float = 1.0
    progress: float = 30.0


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant: which, where, when, and how."""

    invariant: str
    process: str
    time: float
    message: str


class CheckResult(msgspec.Struct, frozen=True):
    """The result of a checker.

    `looked` counts the events that it checked: 0 proves nothing.
    """

    invariant: str
    meaning: str
    looked: int
    violations: tuple[Violation, ...]


class Checker(ABC):
    """One invariant. `name` is a few words, `meaning` a sentence.

    `optional`: it has no result if it looked at nothing, as where real processes log too little for it.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    optional: ClassVar[bool] = False

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.looked = 0
        self.violations: list[Violation] = []

    @abstractmethod
    def observe(self, event: Event) -> None:
        """Check the next event."""

    def finish(self) -> None:
        """Check at the end of the events: what had to happen and did not is a violation."""
        return

    def violated(self, event: Event, message: str) -> None:
        self.violations.append(Violation(self.name, event.process, event.time, message))

    def finding(self) -> CheckResult:
        return CheckResult(self.name, self.meaning, self.looked, tuple(self.violations))
