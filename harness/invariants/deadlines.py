"""Every op completes or errors by its deadline, and so does every attempt at a step."""

from __future__ import annotations

from typing import ClassVar

from holdfast.harness.invariants.checker import Bounds, Checker
from holdfast.harness.invariants.events import Event


class Deadlines(Checker):
    name: ClassVar[str] = "ops end by their deadline"
    meaning: ClassVar[str] = (
        "Every op and every attempt ends, well or with an error, in time; a stopped process is excused."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, Event] = {}
        self._last: dict[str, Event] = {}
        self._stopped: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        if event.kind == "fault":
            if event.text("what") in ("pause", "stop"):
                self._stopped[event.text("target")] = event.time
            return
        self._last[event.process] = event
        if event.kind == "op":
            self.looked += 1
            taken = event.number("seconds")
            limit = event.number("timeout") if "timeout" in event.fields else self.bounds.operation
            if taken > limit + self.bounds.slack and not self._was_stopped(event.process, event.time - taken):
                self.violated(event, f"{event.text('op')} took {taken:.3g} s, its limit is {limit:.3g} s")
        elif event.kind in ("attempt", "committed", "aborted_step", "finished", "error"):
            self._close(event)
            if event.kind == "attempt":
                self.looked += 1
                self._open[event.process] = event

    def finish(self) -> None:
        for process in tuple(self._open):
            self._close(self._last[process])

    def _close(self, event: Event) -> None:
        begun = self._open.pop(event.process, None)
        if begun is None or self._was_stopped(event.process, begun.time):
            return
        taken = event.time - begun.time
        if taken > self.bounds.operation + self.bounds.slack:
            self.violated(event, f"the attempt at step {begun.integer('step')} was open for {taken:.3g} s")

    def _was_stopped(self, process: str, since: float) -> bool:
        return self._stopped.get(process, -1.0) >= since
