"""A committed step is never lost or done twice."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class Commits(Checker):
    name: ClassVar[str] = "committed steps are kept"
    meaning: ClassVar[str] = (
        "On each process committed steps follow each other without a gap or a repeat, from the first or from the "
        "state taken over (or the checkpoint, where state was lost), and all who finish have committed the same last "
        "step."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._newest: dict[str, int] = {}
        self._finished: dict[str, events.StepsFinished] = {}
        self._most: events.StepCommitted | None = None
        self._first: int | None = None
        self._went_back: set[int] = set()

    def observe(self, event: Event) -> None:
        match event:
            case events.StateReceived():
                self._synced(event)
            case events.StateRestored(source="checkpoint"):
                self._newest[event.process] = event.step
                self._went_back.add(event.step)
            case events.StepCommitted():
                self._committed(event)
            case events.StepsFinished() if event.process in self._newest:
                self._finished[event.process] = event

    def finish(self) -> None:
        if self._most is None:
            return
        for process, event in self._finished.items():
            if self._newest[process] != self._most.step:
                self.violated(
                    event,
                    f"finished after step {self._newest[process]}, but {self._most.process} committed step "
                    f"{self._most.step}",
                )

    def _synced(self, event: events.StateReceived) -> None:
        step, newest = event.step, self._newest.get(event.process)
        self.looked += 1
        if newest is not None and step < newest and step not in self._went_back:
            self.violated(event, f"took over the state after step {step}, having committed step {newest}")
        self._newest[event.process] = step

    def _committed(self, event: events.StepCommitted) -> None:
        step = event.step
        self.looked += 1
        if self._first is None:
            self._first = step
        newest = self._newest.get(event.process, self._first - 1)
        if step <= newest:
            self.violated(event, f"committed step {step} again: its newest was {newest}")
        elif step != newest + 1:
            self.violated(event, f"committed step {step} after step {newest}: those between are lost")
        self._newest[event.process] = max(step, newest)
        if self._most is None or step > self._most.step:
            self._most = event
