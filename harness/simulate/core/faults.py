"""Injects each kind of fault into a simulated world, and ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.ft.events import FaultInjected, ProcessStopped
from holdfast.harness.simulate.core.schedule import (
    AtPoint,
    BlockRegister,
    BreakDetector,
    CutPath,
    DelayConnections,
    DelayPath,
    DelayRegister,
    DriftClock,
    Fault,
    JumpClock,
    KillHost,
    KillProcess,
    KillRack,
    KillShare,
    LoseProposals,
    PartitionHosts,
    PauseProcess,
    RefuseSignals,
    SlowProcess,
    StartProcess,
)

if TYPE_CHECKING:
    from holdfast.harness.simulate.core.process import SimulatedProcess
    from holdfast.harness.simulate.core.world import World


def hosts_of(world: World, fault: Fault) -> list[int]:
    """The hosts with processes that a fault makes silent or deaf."""
    match fault:
        case KillProcess(process=number) | PauseProcess(process=number):
            return [world.layout.host_of(number)]
        case KillHost(host=host):
            return [host]
        case KillRack(rack=rack):
            return [host for host in range(world.layout.hosts) if world.layout.rack_of(host) == rack]
        case KillShare(share=share):
            return [int(index / share) for index in range(max(1, int(world.layout.hosts * share)))]
        case CutPath(source=source, target=target) | DelayPath(source=source, target=target):
            return [source, target]
        case PartitionHosts(hosts=hosts):
            return list(hosts)
    return []


def inject(world: World, fault: Fault) -> None:
    """Start a fault, and schedule its end."""
    _say(world, fault)
    match fault:
        case KillProcess(process=number):
            if number < len(world.processes):
                world.kill(world.processes[number], "SIGKILL")
        case KillHost() | KillRack() | KillShare():
            for host in hosts_of(world, fault):
                world.lose_host(host)
        case PauseProcess(process=number, seconds=seconds):
            if number < len(world.processes):
                pause(world, world.processes[number], seconds)
        case StartProcess(host=host):
            world.start_another(host)
        case CutPath(source=source, target=target, seconds=seconds):
            world.paths.cut(source, target, 1)
            world.after(seconds, world.paths.cut, source, target, -1)
        case PartitionHosts(hosts=hosts, seconds=seconds, register=register):
            world.paths.isolate(frozenset(hosts), register, True)
            world.after(seconds, world.paths.isolate, frozenset(hosts), register, False)
        case DelayPath(source=source, target=target, delay=delay, seconds=seconds):
            world.paths.clog(source, target, delay, True)
            world.after(seconds, world.paths.clog, source, target, delay, False)
        case SlowProcess(process=number, delay=delay, seconds=seconds):
            if number < len(world.processes):
                _slow(world.processes[number], delay)
                world.after(seconds, _slow, world.processes[number], -delay)
        case DriftClock(process=number, share=share):
            if number < len(world.processes):
                world.clocks[world.processes[number].host].drift(world.now, share)
        case BlockRegister(seconds=seconds, writes=writes):
            _register(world, writes, 1)
            world.after(seconds, _register, world, writes, -1)
        case JumpClock(host=host, forward=forward):
            world.clocks[host].jump(world.now, forward)
        case DelayConnections(host=host, delay=delay, seconds=seconds):
            world.paths.slow_connecting(host, delay)
            world.after(seconds, world.paths.slow_connecting, host, -delay)
        case BreakDetector(process=number, detector=name):
            if number < len(world.processes):
                world.processes[number].break_detector(name)
        case RefuseSignals(host=host, seconds=seconds):
            world.refusing[host] += 1
            world.after(seconds, world.refusing.subtract, (host,))
        case DelayRegister(delay=delay, seconds=seconds):
            _delay_register(world, delay)
            world.after(seconds, _delay_register, world, -delay)
        case LoseProposals(seconds=seconds, writes=writes):
            _lose_proposals(world, writes, 1)
            world.after(seconds, _lose_proposals, world, writes, -1)
        case AtPoint():
            raise ValueError("a fault at a point strikes when the point is reached")


def inject_at_point(world: World, process: SimulatedProcess, fault: AtPoint) -> None:
    """Inject a fault into `process`, which has reached the fault's point."""
    _say(world, fault, process.member.id)
    if fault.seconds:
        pause(world, process, fault.seconds)
    else:
        world.kill(process, f"SIGKILL at {fault.point}")


def pause(world: World, process: SimulatedProcess, seconds: float) -> None:
    """Pause a process for `seconds`."""
    if not process.alive:
        return
    process.paused_until = max(process.paused_until, world.now + seconds)
    world.emit(process, ProcessStopped(seconds=seconds))
    world.after(seconds, world.resume, process)


def _say(world: World, fault: Fault, target: str = "") -> None:
    if not target:
        names = ("process", "host", "rack", "share", "source", "hosts")
        target = next((f"{name} {getattr(fault, name)}" for name in names if hasattr(fault, name)), "register")
    if isinstance(fault, CutPath | DelayPath):
        target += f" to host {fault.target}"
    what = type(fault).__struct_config__.tag
    fields = [name for name in fault.__struct_fields__ if name not in ("at", "target")]
    details = ", ".join(f"{name} {getattr(fault, name)}" for name in fields)
    world.say("harness", 0, FaultInjected(what=str(what), target=target, details=details))


def _slow(process: SimulatedProcess, delay: float) -> None:
    process.slow = max(0.0, process.slow + delay)


def _register(world: World, writes: bool, by: int) -> None:
    world.register.away += by
    world.register.writes += by if writes else 0


def _delay_register(world: World, by: float) -> None:
    world.register.late = max(0.0, world.register.late + by)


def _lose_proposals(world: World, writes: bool, by: int) -> None:
    world.register.losing += by
    world.register.lost_writes += by if writes else 0
