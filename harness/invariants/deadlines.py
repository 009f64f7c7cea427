"""Every op completes or errors by its deadline, and so does every attempt at a step."""

from __future__ import annotations

from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class Deadlines(Checker):
    name: ClassVar[str] = "ops end by their deadline"
    meaning: ClassVar[str] = (
        "Every op and every attempt ends, well or with an error, in time; a process that is stopped or gone is excused."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._open: dict[str, events.StepBegun] = {}
        self._now = 0.0
        self._gone: set[str] = set()
        self._stopped: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        self._now = event.time
        match event:
            case events.FaultInjected(what="pause" | "stop", target=str(target)):
                self._stopped[target] = event.time
            case events.FaultInjected(what="kill" | "host-lost", target=str(target)):
                self._gone.add(target)
            case events.ProcessDied():
                self._gone.add(event.process)
            case events.DeathsDetected(members=members):
                self._gone.update(members)
            case events.MemberUnreachable(member=member):
                self._gone.add(member)
            case events.OpEnded():
                self._check_op(event)
            case events.StepBegun():
                self._close(event.process)
                self.looked += 1
                self._open[event.process] = event
            case events.StepCommitted() | events.StepAborted() | events.StepsFinished() | events.SessionFailed():
                self._close(event.process)

    def _check_op(self, event: events.OpEnded) -> None:
        self.looked += 1
        limit = self.bounds.operation if event.timeout is UNSET else event.timeout
        if event.seconds <= limit + self.bounds.slack or self._was_stopped(event.process, event.time - event.seconds):
            return
        self.violated(event, f"{event.op} took {event.seconds:.3g} s, its limit is {limit:.3g} s")

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
            self.violated(begun, f"the attempt at step {begun.step} was open for {taken:.3g} s")

    def _was_stopped(self, process: str, since: float) -> bool:
        return self._stopped.get(process, -1.0) >= since
