"""Runs one simulation, checks every invariant after every event, and returns the result."""

from __future__ import annotations

import gc
import logging
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from holdfast.ft import events
from holdfast.ft.membership.view import View
from holdfast.harness.invariants import (
    CHECKERS,
    ENDED,
    Asked,
    Bounds,
    Checker,
    Deadlines,
    Event,
    ProgressResumes,
    Violation,
)
from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.core.world import TraceWriter, World

LIMIT_EVENTS = 2_000_000
MOST_PENDING = 1000
"""The most pending events for each rank: beyond it messages multiply without end, and the run is stopped."""
BY_THE_CLOCK = (Deadlines, ProgressResumes)
"""Checkers that are left out: a schedule sets the length of its faults, and `Completion` bounds the time after."""
SLICE = 0.05
"""Virtual seconds between two looks whether a job without steps has recovered."""

Progress = Callable[[float, int], None]
"""Called with the share of the longest possible run that is over, and the number of events."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `trace` is the hash of all events. `violation` is the first; None if every invariant held.

    `seconds` of virtual time passed, in which `epochs` began and `steps` were committed. Times of the recovery are
    virtual seconds after the first fault: `detected` (first evidence), `agreed` (the register took the first view that
    followed it), `installed` (every survivor had the newest view); None if that did not happen. `depth` is the longest
    path of that view from member to member. Messages and bytes are those that survivors sent or received from the first
    fault on, without heartbeats if the job has no steps. What simulating cost: `setup`, `cpu` and `wall` seconds, and
    `memory` GiB.
    """

    ranks: int
    hosts: int
    seed: int
    trace: str
    events: int
    messages: int
    seconds: float
    epochs: int
    steps: int
    faults: int
    lost: int
    detected: float | None
    agreed: float | None
    installed: float | None
    depth: int
    messages_mean: float
    messages_max: int
    bytes_mean: float
    bytes_max: int
    view_bytes: int
    setup: float
    cpu: float
    wall: float
    memory: float
    violation: Violation | None
    invariants: int

    def recovery(self) -> float | None:
        """From the first evidence to the installation on the last survivor."""
        if self.installed is None or self.detected is None:
            return None
        return self.installed - self.detected


class _Observer:
    """Runs the checkers after every event, up to the first violation; notes the end of processes, and the recovery."""

    def __init__(self, also: Callable[[Event], None] | None) -> None:
        self.checkers: list[Checker] = [checker(Bounds()) for checker in CHECKERS if checker not in BY_THE_CLOCK]
        self._also = also
        self._open: set[str] = set()
        self.lost: set[str] = set()
        self.steps = 0
        self.struck: float | None = None
        self.detected: float | None = None
        self.agreed: float | None = None
        self.installed = 0.0
        self.violation: Violation | None = None

    def observe(self, event: Event) -> None:
        if self._also is not None:
            self._also(event)
        if isinstance(event, Asked):
            self._open.add(event.process)
            if isinstance(event, events.ViewInstalled):
                self.installed = event.time
        elif isinstance(event, ENDED | events.WasEvicted):
            self._open.discard(event.process)
            if not isinstance(event, events.StepsFinished):
                self.lost.add(event.process)
        elif isinstance(event, events.StepCommitted):
            self.steps = max(self.steps, event.step + 1)
        elif isinstance(event, events.FaultInjected):
            self.struck = event.time if self.struck is None else self.struck
        elif isinstance(event, events.MemberSuspected | events.DeathsDetected) and self.struck is not None:
            self.detected = event.time if self.detected is None else self.detected
        self._check(lambda checker: checker.observe(event))

    def written(self, view: View, now: float) -> None:
        """Note that the register has taken a view: the first one after the first evidence follows the fault."""
        if self.agreed is None and self.detected is not None and view.phase == "running":
            self.agreed = now

    def since(self, moment: float | None) -> float | None:
        """The seconds from the first fault to a moment; None if that did not come."""
        return None if moment is None else moment - (self.struck or 0.0)

    def all_ended(self) -> bool:
        """Whether no process is left in the job."""
        return not self._open

    def finish(self) -> None:
        self._check(lambda checker: checker.finish())

    def _check(self, call: Callable[[Checker], None]) -> None:
        for checker in self.checkers if self.violation is None else ():
            call(checker)
            if checker.violations:
                self.violation = checker.violations[0]
                return


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave out what nodes log: it is in their events, and they break here on purpose.

    Python's garbage collector is off: it would scan millions of objects repeatedly and free hardly any.
    """
    log, collecting = logging.getLogger("holdfast.ft"), gc.isenabled()
    before, log.disabled = log.disabled, True
    gc.disable()
    try:
        yield
    finally:
        log.disabled = before
        if collecting:
            gc.enable()


@_undisturbed()
def simulate(
    schedule: Schedule,
    trace: TraceWriter | None = None,
    also: Callable[[Event], None] | None = None,
    progress: Progress = lambda share, events: None,
) -> SimulationResult:
    """Run a schedule: first the faults, then `schedule.bound` seconds without faults in which the job has to end.

    A job without steps has to recover: then every survivor has the newest view. Stops at the first violation. `trace`
    gets every line, `also` every event that a process would log.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    layout, last = schedule.layout, schedule.ends()
    horizon = last + schedule.bound + layout.steps * layout.compute * 2
    seen = _Observer(also)
    world = World(schedule, seen.observe, trace, quiet=not layout.steps)
    sweep = world.register.on_write

    def written(view: View) -> None:
        seen.written(view, world.now)
        sweep(view)

    world.register.on_write = written
    world.after(min((fault.at for fault in schedule.faults), default=0.0), world.reset_counts)
    setup = time.process_time() - cpu_began
    if layout.steps:
        _run_to_the_end(world, seen, horizon)
    else:
        _run_until_recovered(world, seen, horizon, progress)
    survivors = [process for process in world.processes if process.member.id not in seen.lost]
    messages = [process.sent + process.received for process in survivors] or [0]
    nbytes = [process.bytes for process in survivors] or [0]
    view = world.register.view
    return SimulationResult(
        ranks=layout.ranks,
        hosts=layout.hosts,
        seed=schedule.seed,
        trace=world.trace_hash(),
        events=world.events,
        messages=world.messages,
        seconds=world.now,
        epochs=world.register.epoch,
        steps=seen.steps,
        faults=len(schedule.faults),
        lost=len(world.processes) - len(survivors),
        detected=seen.since(seen.detected),
        agreed=seen.since(seen.agreed),
        installed=seen.since(seen.installed) if seen.agreed is not None and not world.behind() else None,
        depth=max((process.hops for process in survivors), default=0),
        messages_mean=sum(messages) / len(messages),
        messages_max=max(messages),
        bytes_mean=sum(nbytes) / len(nbytes),
        bytes_max=max(nbytes),
        view_bytes=len(view.encode()) if view is not None else 0,
        setup=setup,
        cpu=time.process_time() - cpu_began - setup,
        wall=time.perf_counter() - began,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
        violation=seen.violation,
        invariants=len(seen.checkers),
    )


def _run_to_the_end(world: World, seen: _Observer, horizon: float) -> None:
    """Run a job with steps until all of its processes have ended, or have to have."""
    last, layout = world.schedule.ends(), world.layout
    most_pending = MOST_PENDING * (layout.ranks + layout.spares)

    def over() -> bool:
        if seen.violation is not None or world.events > LIMIT_EVENTS or world.pending > most_pending:
            return True
        return world.now > last and world.register.view is not None and seen.all_ended()

    world.run(horizon, over)
    if seen.violation is None and not seen.all_ended():
        world.say("harness", 0, events.SimulationEnds(seconds=world.now - last))
    seen.finish()


def _run_until_recovered(world: World, seen: _Observer, horizon: float, progress: Progress) -> None:
    """Run a job without steps until every survivor has the newest view and no faults are left, or has to have it."""
    faults, last = len(world.schedule.faults), world.schedule.ends()
    while world.now < horizon and seen.violation is None:
        world.run(min(horizon, world.now + SLICE))
        progress(world.now / horizon, world.events)
        known = not faults or (world.register.epoch > 1 and seen.detected is not None)
        if world.now > last and known and _settled(world):
            break
    if seen.violation is None and not _settled(world):
        world.say("harness", 0, events.SimulationEnds(seconds=world.now - last))
    seen.finish()


def _settled(world: World) -> bool:
    """Whether all living processes have the newest view, and that has no dead member."""
    view = world.register.view
    if view is None:
        return False
    return all(world.process_of(member.id).alive for member in view.members) and not world.behind()
