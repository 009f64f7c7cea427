"""A healed job ends: within a bound each living process finishes, or knows why it cannot."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker

ENDED = events.ProcessDied | events.SessionFailed | events.StepsFinished | events.CoreBroken


class CompletionChecker(Checker):
    """Checks runs that end with an event `horizon`, with `seconds` since the end of the last fault."""

    name: ClassVar[str] = "a healed job ends"
    meaning: ClassVar[str] = "Within a bound after the last fault all that live have finished or ended with a reason."
    needs_simulation: ClassVar[bool] = True

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, events.ViewInstalled | events.SpareWaits] = {}
        self._members: set[str] = set()
        self._finished = False

    def observe(self, event: Event) -> None:
        if isinstance(event, events.ViewInstalled | events.SpareWaits):
            self._open[event.process] = event
            if isinstance(event, events.ViewInstalled):
                self._members.add(event.process)
        elif isinstance(event, ENDED):
            self._open.pop(event.process, None)
            self._finished |= isinstance(event, events.StepsFinished)
        elif isinstance(event, events.SimulationEnds):
            self.looked += 1
            for process, last in self._open.items():
                if process in self._members or self._finished:
                    self.violated(
                        event,
                        f"{process} has not ended {event.seconds:.3g} s after the last fault was over; "
                        f"the last "
                        f"it said: {last.kind} epoch {last.epoch} at {last.time:.3g} s",
                    )
