"""Every op completes or errors by its deadline, and so does every attempt at a step."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft.telemetry.event import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class Deadlines(Checker):
    name: ClassVar[str] = "ops end by their deadline"
    meaning: ClassVar[str] = (
        "Every op and every attempt ends, well or with an error, in time; a process that is stopped or gone is excused."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, Event] = {}
        self._now = 0.0
        self._gone: set[str] = set()
        self._stopped: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        self._now = event.time
        if event.kind == "fault":
            if event.text("what") in ("pause", "stop"):
                self._stopped[event.text("target")] = event.time
            elif event.text("what") in ("kill", "host-lost"):
                self._gone.add(event.text("target"))
        elif event.kind == "died":
            self._gone.add(event.process)
        elif event.kind == "detected":
            self._gone.update(event.names("members"))
        elif event.kind == "condemned":
            self._gone.add(event.text("member"))
        elif event.kind == "op":
            self.looked += 1
            taken = event.number("seconds")
            limit = event.number("timeout") if "timeout" in event.fields else self.bounds.operation
            if taken > limit + self.bounds.slack and not self._was_stopped(event.process, event.time - taken):
                self.violated(event, f"{event.text('op')} took {taken:.3g} s, its limit is {limit:.3g} s")
        elif event.kind in ("attempt", "committed", "aborted_step", "finished", "error"):
            self._close(event.process)
            if event.kind == "attempt":
                self.looked += 1
                self._open[event.process] = event

    def finish(self) -> None:
        for process in tuple(self._open):
            if process not in self._gone:
                self._close(process)

    def _close(self, process: str) -> None:
        begun = self._open.pop(process, None)
        if begun is None or self._was_stopped(process, begun.time):
            return
        taken = self._now - begun.time
        if taken > self.bounds.operation + self.bounds.slack:
            self.violated(begun, f"the attempt at step {begun.integer('step')} was open for {taken:.3g} s")

    def _was_stopped(self, process: str, since: float) -> bool:
        return self._stopped.get(process, -1.0) >= since
