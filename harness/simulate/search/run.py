"""Runs one simulation, checks every invariant after every event, and returns the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from holdfast.ft import events
from holdfast.harness.invariants import CHECKERS, Bounds, Checker, Event, Violation
from holdfast.harness.invariants.liveness import ENDED, Deadlines, ProgressResumes
from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.core.trace import TraceWriter
from holdfast.harness.simulate.core.world import World

LIMIT_EVENTS = 2_000_000
MOST_PENDING = 1000
"""The most pending events for each rank: beyond it messages multiply without end, and the run is stopped."""
BY_THE_CLOCK = (Deadlines, ProgressResumes)
"""Checkers that are left out: a schedule sets the length of its faults, and `Completion` bounds the time after."""


class SimulationResult(msgspec.Struct, frozen=True):
    """The result. `trace` is the hash of all events. `violation` is the first; None if every invariant held.

    `seconds` of virtual time passed, in which `epochs` began and `steps` were committed.
    """

    seed: int
    trace: str
    events: int
    messages: int
    seconds: float
    epochs: int
    steps: int
    faults: int
    violation: Violation | None
    invariants: int


class InvariantChecks:
    """Runs the checkers after every event, up to the first violation, and tracks the end of all processes."""

    def __init__(self, bounds: Bounds, also: Callable[[Event], None] | None = None) -> None:
        self.checkers: list[Checker] = [checker(bounds) for checker in CHECKERS if checker not in BY_THE_CLOCK]
        self._also = also
        self._open: set[str] = set()
        self.steps = 0
        self.violation: Violation | None = None

    def observe(self, event: Event) -> None:
        if self._also is not None:
            self._also(event)
        if isinstance(event, events.ViewInstalled | events.SpareWaits):
            self._open.add(event.process)
        elif isinstance(event, ENDED):
            self._open.discard(event.process)
        elif isinstance(event, events.StepCommitted):
            self.steps = max(self.steps, event.step + 1)
        if self.violation is None:
            for checker in self.checkers:
                checker.observe(event)
                if checker.violations:
                    self.violation = checker.violations[0]
                    return

    def all_ended(self) -> bool:
        """Whether no process is left in the job."""
        return not self._open

    def finish(self) -> None:
        for checker in self.checkers:
            if self.violation is None:
                checker.finish()
                if checker.violations:
                    self.violation = checker.violations[0]


@contextmanager
def without_log() -> Iterator[None]:
    """Leave out what nodes log: it is in their events, and they break here on purpose."""
    log = logging.getLogger("holdfast.ft")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@without_log()
def simulate(
    schedule: Schedule, trace: TraceWriter | None = None, also: Callable[[Event], None] | None = None
) -> SimulationResult:
    """Run a schedule: first the faults, then `schedule.bound` seconds without faults in which the job has to end.

    Stops at the first violation. `trace` gets every line, `also` every event that a process would log.
    """
    horizon = schedule.ends() + schedule.bound + schedule.layout.steps * schedule.layout.compute * 2
    checks = InvariantChecks(Bounds(), also)
    world = World(schedule, checks.observe, trace)
    struck = schedule.ends()
    most_pending = MOST_PENDING * (schedule.layout.ranks + schedule.layout.spares)

    def over() -> bool:
        if checks.violation is not None or world.events > LIMIT_EVENTS or world.pending > most_pending:
            return True
        return world.now > struck and world.register.view is not None and checks.all_ended()

    world.run(horizon, over)
    if checks.violation is None and not checks.all_ended():
        world.say("harness", 0, events.SimulationEnds(seconds=world.now - struck))
    checks.finish()
    return SimulationResult(
        seed=schedule.seed,
        trace=world.trace_hash(),
        events=world.events,
        messages=world.messages,
        seconds=world.now,
        epochs=world.register.epoch,
        steps=checks.steps,
        faults=len(schedule.faults),
        violation=checks.violation,
        invariants=len(checks.checkers),
    )
