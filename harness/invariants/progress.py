"""Progress resumes: after a fault the next step is committed within a bound."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class ProgressResumes(Checker):
    name: ClassVar[str] = "progress resumes"
    meaning: ClassVar[str] = "After the last of any faults a step is committed, or the job ends, within the bound."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._fault: Event | None = None
        self._now = 0.0

    def observe(self, event: Event) -> None:
        self._now = event.time
        if isinstance(event, events.FaultInjected | events.DeathsDetected):
            self.looked += 1
            self._overdue()
            if isinstance(event, events.FaultInjected) or self._fault is None:
                self._fault = event
        elif isinstance(event, events.StepCommitted | events.StepsFinished):
            self._overdue()
            self._fault = None

    def finish(self) -> None:
        self._overdue()

    def _overdue(self) -> None:
        if self._fault is None or self._now - self._fault.time <= self.bounds.progress:
            return
        self.violated(
            self._fault,
            f"no step was committed within {self.bounds.progress:.3g} s of this {self._fault.kind}: "
            f"{self._now - self._fault.time:.3g} s passed",
        )
        self._fault = None
