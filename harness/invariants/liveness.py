"""The invariants of time: every op, attempt, recovery and job ends, and no core breaks."""

from __future__ import annotations

from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class Deadlines(Checker):
    """Every op completes or errors by its deadline, and so does every attempt at a step."""

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


class ProgressResumes(Checker):
    """Progress resumes: after a fault the next step is committed within a bound."""

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


ENDED = events.ProcessDied | events.SessionFailed | events.StepsFinished | events.CoreBroken


class CompletionChecker(Checker):
    """Checks runs that end with an event `horizon`, with `seconds` since the end of the last fault."""

    name: ClassVar[str] = "a healed job ends"
    meaning: ClassVar[str] = "Within a bound after the last fault all that live have finished or ended with a reason."
    optional: ClassVar[bool] = True

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


STATE_APART = ("come apart", "call steps() alike")
"""Parts of a session's errors when ranks do not have the same state."""


class Unbroken(Checker):
    """The protocol does not break by itself: no event brings the core into an impossible state."""

    name: ClassVar[str] = "the core goes on"
    meaning: ClassVar[str] = "No process fails by its own membership core, and ranks never come apart in their state."

    def observe(self, event: Event) -> None:
        match event:
            case events.ViewInstalled():
                self.looked += 1
            case events.SessionFailed(error=error) if any(words in error for words in STATE_APART):
                self.violated(event, error)
            case events.CoreBroken(error=error):
                self.violated(event, error)
