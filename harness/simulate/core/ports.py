"""The ports of a node in virtual time: clock, links, register and processes, each with faults."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.comms.plugins.spec import Available, DetectorInfo
from holdfast.comms.transport.base import Peer
from holdfast.ft.detectors import plugin
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.process_watch import death_of
from holdfast.ft.membership.events import CasFailed, CasLost, CasWon, ViewRead
from holdfast.ft.membership.view import Member, View
from holdfast.ft.node.connections import LATE_SECONDS, REDIAL_SECONDS, RETRY_SECONDS
from holdfast.ft.node.messages import Beat
from holdfast.ft.node.register import WATCH_SECONDS
from holdfast.ft.ports import Answer, OnDeaths, OpPosition

if TYPE_CHECKING:
    from holdfast.harness.simulate.core.process import SimulatedProcess


SIMULATED_DETECTORS = ("pidfd", "heartbeat", "observers", "transport", "progress")
"""The built-in detectors that stand on ports alone: all but that which asks NCCL's service."""
MOMENT, LATE = 0.05, 0.05
"""Timers of less than a moment ring late in a share of cases: their process was not scheduled."""
TRIPS_TO_CONNECT = 3
"""The one-way messages until a connection stands: the handshakes of TCP and of the key."""


@cache
def _builtin() -> tuple[DetectorInfo, ...]:
    return tuple(info for info in plugin.holdfast_detectors() if info.name in SIMULATED_DETECTORS)


def detectors(made: dict[str, Detector]) -> Iterator[DetectorInfo]:
    """The detectors of a simulated node. Those that the node makes are put into `made`."""
    for info in _builtin():

        def make(context: DetectorContext, info: DetectorInfo = info) -> Detector:
            made[info.name] = info.make(context)
            return made[info.name]

        yield replace(info, probe=Available, make=make)


class SimulatedTimer:
    """A call that is due, in the queue of the world or in the backlog of its process."""

    __slots__ = ("_act", "_args")

    def __init__(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._act: Callable[..., object] | None = act
        self._args = args

    def cancel(self) -> None:
        self._act = None

    def ring(self) -> None:
        if self._act is not None:
            self._act(*self._args)


class SimulatedTime:
    """The clock of the process's host. It runs on while the process is paused; timers then ring at the end."""

    __slots__ = ("_process",)

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def time(self) -> float:
        world = self._process.world
        return world.clocks[self._process.host].read(world.now)

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> SimulatedTimer:
        world = self._process.world
        if delay < MOMENT and world.rng.random() < world.schedule.machine.late:
            delay += LATE
        timer = SimulatedTimer(callback, args)
        self._process.after(delay, timer.ring)
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> None:
        self._process.after(0.0, SimulatedTimer(callback, args).ring)


class SimulatedLinks:
    """The connections of one process, made and lost as `MemberConnections` makes and loses them.

    In a quiet world they stand at once, and processes without heartbeats need none.
    """

    __slots__ = ("_dialling", "_links", "_process", "_wanted", "closed")

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._wanted: dict[str, Member] = {}
        self._links: dict[str, bool] = {}
        """By the id of the other process: whether this one has dialled."""
        self._dialling: dict[str, None] = {}
        self.closed = False

    # The port -------------------------------------------------------------------------------------------------

    def follow(self, at_once: Iterable[Member], later: Iterable[Member]) -> None:
        now = {member.id: member for member in at_once}
        self._wanted = {**{member.id: member for member in later}, **now}
        for member_id in [each for each, dialled in self._links.items() if dialled and each not in self._wanted]:
            self._end(member_id)
        for member in self._wanted.values():
            if member.id not in self._links and member.id not in self._dialling:
                self._dial(member, 0.0 if member.id in now else LATE_SECONDS)

    def notify(self, member_id: str, method: str, body: bytes) -> bool:
        if member_id not in self._links:
            return False
        self._process.world.send(self._process, member_id, method, body)
        return True

    def deliver(self, member: Member, method: str, body: bytes) -> None:
        process = self._process
        if self.notify(member.id, method, body) or member.id in self._wanted or self.closed:
            return
        if process.loud and process.world.find(member.id) is not None:  # a message follows its own connection
            process.after(self._connecting(member.id), process.world.send, process, member.id, method, body)
        else:
            process.world.send(process, member.id, method, body)

    def notify_all(self, method: str, body: bytes, but: Collection[str] = ()) -> None:
        process, world = self._process, self._process.world
        quiet: list[str] = []
        for member_id in list(self._links):
            if not world.process_of(member_id).loud:
                quiet.append(member_id)
            elif member_id not in but:
                world.send(process, member_id, method, body)
        if quiet and method == "beat":
            process.after(world.network.local, self._hear_quiet, quiet)

    # Connections ----------------------------------------------------------------------------------------------

    def _hear_quiet(self, member_ids: list[str]) -> None:
        """Hear the heartbeats of processes that no fault befalls, which do not send any."""
        for member_id in member_ids:
            other = self._process.world.process_of(member_id)
            if not other.loud and other.alive:
                view = other.core.view
                self._process.node.hear(member_id, Beat(0 if view is None else view.epoch))

    def _connecting(self, member_id: str) -> float:
        """The time to connect to another process."""
        world, other = self._process.world, self._process.world.process_of(member_id)
        return TRIPS_TO_CONNECT * world.paths.latency(self._process.host, other.host) + self._process.slow + other.slow

    def _dial(self, member: Member, delay: float) -> None:
        world = self._process.world
        if world.quiet:
            if world.process_of(member.id).alive:
                self._connected(member.id)
                world.process_of(member.id).links.accept(self._process.member.id)
            return
        self._dialling[member.id] = None
        self._process.after(delay + world.paths.connect_delay(self._process.host), self._try, member)

    def _try(self, member: Member) -> None:
        process, world, other = self._process, self._process.world, self._process.world.process_of(member.id)
        if member.id in self._links or member.id not in self._wanted or self.closed:
            self._dialling.pop(member.id, None)
            return
        source, target = process.host, other.host
        if world.paths.is_cut(source, target) or world.paths.is_cut(target, source) or world.is_gone(target):
            process.after(max(world.network.retransmit, RETRY_SECONDS), self._try, member)
        elif not other.alive or other.links.closed:
            process.after(self._connecting(member.id), self._refused, member)
        else:
            delay = self._connecting(member.id)
            process.after(delay, self._connected, member.id)
            other.after(delay, other.links.accept, process.member.id)

    def _refused(self, member: Member) -> None:
        self._process.node.refused(member.id)
        self._process.after(RETRY_SECONDS, self._try, member)

    def _connected(self, member_id: str) -> None:
        self._dialling.pop(member_id, None)
        if not self.closed:
            self._links[member_id] = True
            self._process.node.linked(member_id)

    def accept(self, member_id: str) -> None:
        """Another process has connected."""
        if not self.closed:
            self._links.setdefault(member_id, False)
            self._process.node.linked(member_id)

    def lost(self, member_id: str) -> None:
        """The other end of a connection was closed."""
        if self._links.pop(member_id, None) is None or self.closed:
            return
        member = self._wanted.get(member_id)
        if member is not None and member_id not in self._dialling:
            self._dial(member, REDIAL_SECONDS)

    def close(self) -> None:
        """End all connections, as the kernel does for a process that ends."""
        self.closed = True
        for member_id in list(self._links):
            self._end(member_id)

    def _end(self, member_id: str) -> None:
        del self._links[member_id]
        world, other = self._process.world, self._process.world.process_of(member_id)
        delay = world.paths.latency(self._process.host, other.host)
        world.at(world.now + delay, other, other.links.lost, self._process.member.id)


class SimulatedRegisterPort:
    """The way of one process to the register. Requests are made one after another, as one thread makes them."""

    __slots__ = ("_process", "_waiting")

    pushes = False

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._waiting: list[tuple[Callable[[], object], Callable[..., None]]] = []

    def read(self, done: Callable[[ViewRead | None], None]) -> None:
        self._ask(self._read, done)

    def compare_and_set(self, expected: int, view: View, done: Callable[[Answer], None]) -> None:
        self._ask(lambda: self._compare_and_set(expected, view), done)

    def watch(self, newer_than: int, done: Callable[[ViewRead | None], None]) -> None:
        process, world, answered = self._process, self._process.world, False
        ends = world.now + WATCH_SECONDS

        def look() -> None:
            nonlocal answered
            if answered:
                return
            found = self._read()
            newer = found is not None and found.view is not None and found.view.epoch > newer_than
            if found is None or newer or world.now >= ends:
                answered = True
                answer = found if found is None or newer else ViewRead(None)
                world.at(world.now + world.paths.register_latency(), process, done, answer)

        world.register.watchers.append(look)
        world.after(world.paths.register_latency(), look)
        world.after(WATCH_SECONDS, look)

    def _ask(self, request: Callable[[], Any], done: Callable[..., None]) -> None:
        """Make a request once those before it are answered."""
        self._waiting.append((request, done))
        if len(self._waiting) == 1:
            self._next()

    def _next(self) -> None:
        world, slow = self._process.world, self._process.slow

        def arrive() -> None:
            request, done = self._waiting[0]
            answer = request()
            back = world.paths.register_latency() + slow + world.register.late
            world.after(back, self._answered)
            if answer is not LOST:
                world.work(world.now + back, self._process, world.schedule.machine.register, done, answer)

        world.after(world.paths.register_latency() + slow, arrive)

    def _answered(self) -> None:
        del self._waiting[0]
        if self._waiting:
            self._next()

    def _read(self) -> ViewRead | None:
        world = self._process.world
        if world.register.away or not world.paths.reaches_register(self._process.host):
            return None
        return ViewRead(world.register.view)

    def _compare_and_set(self, expected: int, view: View) -> object:
        process, world = self._process, self._process.world
        answer: object
        if world.register.losing and not world.register.lost_writes:
            return LOST
        if world.paths.reaches_register(process.host):
            answer = world.register.compare_and_set(expected, view)
        else:
            answer = CasFailed("the register cannot be reached")
        process.hops = 0
        if world.register.losing:
            answer = LOST
        world.trace("register", process.member.id, f"{type(answer).__name__} epoch={view.epoch}")
        return answer


class Lost:
    """The answer to a request that never arrives."""


LOST = Lost()


class SimulatedProcesses:
    """The processes of the host of one process, as its kernel shows them."""

    __slots__ = ("_process", "followed", "heartbeat")

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self.followed = SimulatedWatch(process)
        self.heartbeat = SimulatedPage(process)

    def watch(self, on_deaths: OnDeaths) -> SimulatedWatch:
        self.followed.on_deaths = on_deaths
        return self.followed

    def page(self) -> SimulatedPage:
        return self.heartbeat

    def open_page(self, peer: Peer, number: int) -> SimulatedPage:
        other = self._process.world.processes[peer.pid - 1]
        if not other.alive:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        return other.page

    def is_gone(self, peer: Peer) -> bool:
        return peer.host == self._process.member.peer.host and not self._process.world.processes[peer.pid - 1].alive

    def is_stopped(self, pid: int) -> bool:
        other = self._process.world.processes[pid - 1]
        return other.alive and other.paused_until > self._process.world.now

    def cpu_ticks(self, pid: int) -> int:
        return 0

    def kill(self, peer: Peer) -> None:
        """Send SIGKILL, which strikes a moment later. Raises OSError while the kernel refuses it."""
        world = self._process.world
        if world.refusing[self._process.host]:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        world.after(world.network.local, world.kill, world.processes[peer.pid - 1], "fenced")


class SimulatedWatch:
    """Reports the ends of the processes of one host that it follows."""

    __slots__ = ("_followed", "_process", "on_deaths")

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._followed: dict[str, Member] = {}
        self.on_deaths: OnDeaths = lambda deaths: None

    def follow(self, members: Iterable[Member]) -> None:
        me = self._process.member
        before = self._followed
        self._followed = {m.id: m for m in members if m.peer.host == me.peer.host and m.id != me.id}
        for member_id in self._followed:
            if member_id not in before and not self._process.world.process_of(member_id).alive:
                self.ended(member_id)

    def ended(self, member_id: str) -> None:
        """A process of this host has ended: report it soon, if it is followed."""
        member, world = self._followed.get(member_id), self._process.world
        if member is not None:
            machine = world.schedule.machine
            delay = machine.gone * (0.5 + world.rng.random())
            world.work(world.now + delay, self._process, machine.message, self._report, member)

    def _report(self, member: Member) -> None:
        self.on_deaths((death_of(member),))

    def close(self) -> None:
        self._followed = {}


class SimulatedPage:
    """The heartbeat of one process in shared memory. That of a process without heartbeats is always new."""

    __slots__ = ("_beat", "_process")

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._beat: tuple[float, OpPosition] | None = None

    @property
    def number(self) -> int:
        return self._process.number

    def beat(self, now: float, place: OpPosition) -> None:
        self._beat = now, place

    def read(self) -> tuple[float, OpPosition] | None:
        return self._beat

    def close(self) -> None:
        """Its memory stays as long as its process."""


# The register ---------------------------------------------------------------------------------------------------------


class SimulatedRegister:
    """Holds the newest view. `watchers` are called once after the next write.

    `away` counts current outages, `writes` those in which writes still take effect, `losing` those in which the answers
    to proposals are lost, and `lost_writes` those of these in which they take effect. Every answer comes `late` seconds
    later.
    """

    def __init__(self, view: View | None) -> None:
        self.view = view
        self.away = 0
        self.writes = 0
        self.losing = 0
        self.lost_writes = 0
        self.late = 0.0
        self.on_write: Callable[[View], None] = lambda view: None
        self.watchers: list[Callable[[], None]] = []

    @property
    def epoch(self) -> int:
        return 0 if self.view is None else self.view.epoch

    def compare_and_set(self, expected: int, view: View) -> Answer:
        """Handle a proposal that arrives now."""
        if view.epoch != expected + 1:
            raise ValueError(f"the view after epoch {expected} has epoch {expected + 1}, not {view.epoch}")
        if self.away and not self.writes:
            return CasFailed("the register is away")
        if self.epoch == expected:
            self.view = view
            self.on_write(view)
            watchers, self.watchers = self.watchers, []
            for look in watchers:
                look()
            return CasFailed("the answer was lost") if self.away else CasWon(view)
        return CasFailed("the register is away") if self.away else CasLost(self.view)
