"""Runs a scenario with many ranks: measures the membership protocol in virtual time, and the simulation's cost."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable

import msgspec
import numpy as np

from holdfast.ft import events
from holdfast.ft.membership.view import View
from holdfast.harness.invariants import Bounds, Event, Violation
from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.core.trace import TraceWriter
from holdfast.harness.simulate.core.world import World
from holdfast.harness.simulate.search.run import InvariantChecks, without_log

SLICE = 0.05
"""Virtual seconds between two checks whether the run is done."""


class ScaleResult(msgspec.Struct, frozen=True):
    """One run.

    Protocol results in virtual seconds after the first fault: `detected` (first evidence), `agreed` (the register took
    the first view that followed), `installed` (every survivor had the newest view); None if that did not happen.
    `depth` is the longest path of that view from member to member. Messages and bytes are those that survivors sent or
    received from the first fault on, without heartbeats. Costs of the simulation: `cpu` and `wall` seconds, `memory`
    GiB.
    """

    ranks: int
    hosts: int
    lost: int
    seed: int
    epochs: int
    detected: float | None
    agreed: float | None
    installed: float | None
    depth: int
    messages_mean: float
    messages_max: int
    bytes_mean: float
    bytes_max: int
    view_bytes: int
    events: int
    setup: float
    cpu: float
    wall: float
    memory: float
    trace: str
    violation: Violation | None

    def recovery(self) -> float | None:
        """From the first evidence to the installation on the last survivor."""
        if self.installed is None or self.detected is None:
            return None
        return self.installed - self.detected


class _RecoveryTimes:
    """Records the first and last times of events after the fault."""

    def __init__(self) -> None:
        self.struck: float | None = None
        self.detected: float | None = None
        self.installed = 0.0

    def observe(self, event: Event) -> None:
        if isinstance(event, events.FaultInjected) and self.struck is None:
            self.struck = event.time
        elif isinstance(event, events.ViewInstalled):
            self.installed = event.time
        elif isinstance(event, events.MemberSuspected | events.DeathsDetected) and self.struck is not None:
            self.detected = event.time if self.detected is None else self.detected


def measure(
    schedule: Schedule,
    trace: TraceWriter | None = None,
    progress: Callable[[float, int], None] = lambda share, events: None,
) -> ScaleResult:
    """Run a schedule without steps until every survivor has the newest view and no faults are left.

    `progress(share, events)` is called with the share of the longest possible run that is over. Python's garbage
    collector is off meanwhile: it would scan millions of objects repeatedly and free hardly any.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _measure(schedule, trace, progress)
    finally:
        if collecting:
            gc.enable()


@without_log()
def _measure(schedule: Schedule, trace: TraceWriter | None, progress: Callable[[float, int], None]) -> ScaleResult:
    began, cpu_began = time.perf_counter(), time.process_time()
    clock = _RecoveryTimes()
    checks = InvariantChecks(Bounds(operation=1e6, progress=1e6), clock.observe)
    world = World(schedule, checks.observe, trace, quiet=True)
    agreed: list[float] = []
    sweep = world.register.on_write

    def written(view: View) -> None:
        agreed.append(world.now)
        sweep(view)

    world.register.on_write = written
    world.after(min((fault.at for fault in schedule.faults), default=0.0), world.reset_counts)
    setup = time.process_time() - cpu_began
    horizon = schedule.ends() + schedule.bound
    _run(world, checks, clock, horizon, progress)
    survivors = [process for process in world.processes if process.alive and not process.core.ended]
    lost = len(world.processes) - len(survivors)
    messages = np.array([process.sent + process.received for process in survivors])
    nbytes = np.array([process.bytes for process in survivors])
    struck = clock.struck if clock.struck is not None else 0.0
    return ScaleResult(
        ranks=schedule.layout.ranks,
        hosts=schedule.layout.hosts,
        lost=lost,
        seed=schedule.seed,
        epochs=world.register.epoch,
        detected=None if clock.detected is None else clock.detected - struck,
        agreed=agreed[0] - struck if agreed else None,
        installed=clock.installed - struck if agreed and _settled(world) else None,
        depth=max(process.hops for process in survivors),
        messages_mean=float(messages.mean()),
        messages_max=int(messages.max()),
        bytes_mean=float(nbytes.mean()),
        bytes_max=int(nbytes.max()),
        view_bytes=len(world.register.view.encode()) if world.register.view is not None else 0,
        events=world.events,
        setup=setup,
        cpu=time.process_time() - cpu_began - setup,
        wall=time.perf_counter() - began,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
        trace=world.trace_hash(),
        violation=checks.violation,
    )


def _run(
    world: World, checks: InvariantChecks, clock: _RecoveryTimes, horizon: float, progress: Callable[[float, int], None]
) -> None:
    faults, last = len(world.schedule.faults), world.schedule.ends()
    while world.now < horizon and checks.violation is None:
        world.run(min(horizon, world.now + SLICE))
        progress(world.now / horizon, world.events)
        dead = not faults or (world.register.epoch > 1 and clock.detected is not None)
        if world.now > last and dead and _settled(world):
            return


def _settled(world: World) -> bool:
    """Whether all living processes have the newest view, and that has no dead member."""
    view = world.register.view
    if view is None:
        return False
    if any(not world.process_of(member.id).alive for member in view.members):
        return False
    return not world.behind()
