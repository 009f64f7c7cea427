"""The kinds of faults: what each breaks in a simulated world, and how it ends. Their tags name them in schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.ft.events import FaultInjected, ProcessStopped
from holdfast.ft.faultpoints import POINTS

if TYPE_CHECKING:
    from holdfast.harness.simulate.core.process import SimulatedProcess
    from holdfast.harness.simulate.core.schedule import JobLayout
    from holdfast.harness.simulate.core.world import World

Undo = Callable[[], None]


class FaultKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="fault", kw_only=True):
    """A fault at `at` seconds; those that have `seconds` end after them.

    Chaos has the same faults as `Kill`, `Cut` and so on, but with ranks and roles for targets and triggers for times.
    """

    at: float

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        """The hosts with processes that it makes silent or deaf."""
        return ()

    def inject(self, world: World) -> Undo | None:
        """Break it. Returns what ends the fault, if it ends."""
        raise NotImplementedError


def inject(world: World, fault: Fault) -> None:
    """Start a fault, and schedule its end."""
    names = ("process", "host", "rack", "share", "source", "hosts")
    target = next((f"{name} {getattr(fault, name)}" for name in names if hasattr(fault, name)), "register")
    if isinstance(fault, CutPath | DelayPath):
        target += f" to host {fault.target}"
    _say(world, fault, target)
    undo = fault.inject(world)
    if undo is not None:
        world.after(getattr(fault, "seconds"), undo)  # noqa: B009  (not all kinds have it)


def _say(world: World, fault: Fault, target: str) -> None:
    fields = [name for name in fault.__struct_fields__ if name not in ("at", "target")]
    details = ", ".join(f"{name} {getattr(fault, name)}" for name in fields)
    world.say("harness", 0, FaultInjected(what=str(fault.__struct_config__.tag), target=target, details=details))


# Processes and hosts ------------------------------------------------------------------------------------------------


class KillProcess(FaultKind, frozen=True, tag="crash"):
    """A process ends."""

    process: int

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return (layout.host_of(self.process),)

    def inject(self, world: World) -> Undo | None:
        world.kill(world.processes[self.process], "SIGKILL")
        return None


class _HostsEnd(FaultKind, frozen=True):
    def inject(self, world: World) -> Undo | None:
        for host in self.silenced(world.layout):
            world.lose_host(host)
        return None


class KillHost(_HostsEnd, frozen=True, tag="crash_host"):
    """Every process of a host ends at once."""

    host: int

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return (self.host,)


class KillRack(_HostsEnd, frozen=True, tag="crash_rack"):
    """Every process of a rack ends at once."""

    rack: int

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return [host for host in range(layout.hosts) if layout.rack_of(host) == self.rack]


class KillShare(_HostsEnd, frozen=True, tag="crash_share"):
    """A share of all hosts, evenly spread, ends at once."""

    share: float

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return [int(index / self.share) for index in range(max(1, int(layout.hosts * self.share)))]


class PauseProcess(FaultKind, frozen=True, tag="pause"):
    """A process is paused for `seconds` (SIGSTOP), and then continues."""

    process: int
    seconds: float

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return (layout.host_of(self.process),)

    def inject(self, world: World) -> Undo | None:
        return pause(world, world.processes[self.process], self.seconds)


def pause(world: World, process: SimulatedProcess, seconds: float) -> Undo | None:
    """Pause a process for `seconds`; returns what ends the pause."""
    if not process.alive:
        return None
    process.paused_until = max(process.paused_until, world.now + seconds)
    world.emit(process, ProcessStopped(seconds=seconds))
    return lambda: world.resume(process)


class AtPoint(FaultKind, frozen=True, tag="at_point"):
    """The `nth` arrival at a point of the protocol, from `at` on, kills (0 seconds) or pauses the process."""

    point: str
    nth: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"no fault point {self.point!r}; there are {', '.join(POINTS)}")

    def strike(self, world: World, process: SimulatedProcess) -> None:
        """Inject it into `process`, which has reached the point."""
        _say(world, self, process.member.id)
        if not self.seconds:
            world.kill(process, f"SIGKILL at {self.point}")
        elif (resume := pause(world, process, self.seconds)) is not None:
            world.after(self.seconds, resume)


class StartProcess(FaultKind, frozen=True, tag="restart"):
    """A new process starts on a host and wants to take part."""

    host: int

    def inject(self, world: World) -> Undo | None:
        world.start_another(self.host)
        return None


class SlowProcess(FaultKind, frozen=True, tag="slow"):
    """Everything that a process does takes longer by `delay`."""

    process: int
    delay: float
    seconds: float

    def inject(self, world: World) -> Undo | None:
        process = world.processes[self.process]

        def slow(by: float) -> None:
            process.slow = max(0.0, process.slow + by)

        slow(self.delay)
        return lambda: slow(-self.delay)


class DriftClock(FaultKind, frozen=True, tag="drift"):
    """From now on the clock of a process's host runs faster by `share` (slower if negative)."""

    process: int
    share: float

    def inject(self, world: World) -> Undo | None:
        world.clocks[world.processes[self.process].host].drift(world.now, self.share)
        return None


class JumpClock(FaultKind, frozen=True, tag="clock_jump"):
    """The clock of a host jumps forward by `forward` seconds, as that of a virtual machine that was moved."""

    host: int
    forward: float

    def inject(self, world: World) -> Undo | None:
        world.clocks[self.host].jump(world.now, self.forward)
        return None


class BreakDetector(FaultKind, frozen=True, tag="detector_raises"):
    """A detector of a process raises from now on, whenever it looks."""

    process: int
    detector: Literal["pidfd", "heartbeat", "observers"]

    def inject(self, world: World) -> Undo | None:
        world.processes[self.process].break_detector(self.detector)
        return None


class RefuseSignals(FaultKind, frozen=True, tag="signals_refused"):
    """For `seconds`, the kernel of a host refuses to send SIGKILL."""

    host: int
    seconds: float

    def inject(self, world: World) -> Undo | None:
        world.refusing[self.host] += 1
        return lambda: world.refusing.subtract((self.host,))


# The network --------------------------------------------------------------------------------------------------------


class CutPath(FaultKind, frozen=True, tag="cut"):
    """Nothing gets through from one host to another, one way."""

    source: int
    target: int
    seconds: float

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return (self.source, self.target)

    def inject(self, world: World) -> Undo | None:
        world.paths.cut(self.source, self.target, 1)
        return lambda: world.paths.cut(self.source, self.target, -1)


class PartitionHosts(FaultKind, frozen=True, tag="isolate"):
    """These hosts and the others do not reach each other; these do not reach the register either, unless `register`."""

    hosts: tuple[int, ...]
    seconds: float
    register: bool = False

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return self.hosts

    def inject(self, world: World) -> Undo | None:
        hosts = frozenset(self.hosts)
        world.paths.isolate(hosts, self.register, True)
        return lambda: world.paths.isolate(hosts, self.register, False)


class DelayPath(FaultKind, frozen=True, tag="clog"):
    """Every message from one host to another takes longer by `delay`; order is kept."""

    source: int
    target: int
    delay: float
    seconds: float

    def silenced(self, layout: JobLayout) -> Sequence[int]:
        return (self.source, self.target)

    def inject(self, world: World) -> Undo | None:
        world.paths.clog(self.source, self.target, self.delay, True)
        return lambda: world.paths.clog(self.source, self.target, self.delay, False)


class DelayConnections(FaultKind, frozen=True, tag="links_late"):
    """For `seconds`, a connection that a host dials stands later by `delay`."""

    host: int
    delay: float
    seconds: float

    def inject(self, world: World) -> Undo | None:
        world.paths.slow_connecting(self.host, self.delay)
        return lambda: world.paths.slow_connecting(self.host, -self.delay)


# The register -------------------------------------------------------------------------------------------------------


class BlockRegister(FaultKind, frozen=True, tag="register_away"):
    """The register does not answer. With `writes` its writes take effect all the same."""

    seconds: float
    writes: bool = False

    def inject(self, world: World) -> Undo | None:
        def block(by: int) -> None:
            world.register.away += by
            world.register.writes += by if self.writes else 0

        block(1)
        return lambda: block(-1)


class DelayRegister(FaultKind, frozen=True, tag="register_late"):
    """For `seconds`, every answer of the register comes later by `delay`; what is asked for happens at once."""

    delay: float
    seconds: float

    def inject(self, world: World) -> Undo | None:
        def delay(by: float) -> None:
            world.register.late = max(0.0, world.register.late + by)

        delay(self.delay)
        return lambda: delay(-self.delay)


class LoseProposals(FaultKind, frozen=True, tag="proposals_lost"):
    """For `seconds`, no proposal is answered. With `writes` it takes effect all the same."""

    seconds: float
    writes: bool = False

    def inject(self, world: World) -> Undo | None:
        def lose(by: int) -> None:
            world.register.losing += by
            world.register.lost_writes += by if self.writes else 0

        lose(1)
        return lambda: lose(-1)


Fault = (
    KillProcess
    | KillHost
    | KillRack
    | KillShare
    | PauseProcess
    | AtPoint
    | StartProcess
    | CutPath
    | PartitionHosts
    | DelayPath
    | SlowProcess
    | DriftClock
    | BlockRegister
    | JumpClock
    | DelayConnections
    | BreakDetector
    | RefuseSignals
    | DelayRegister
    | LoseProposals
)
