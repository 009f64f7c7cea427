"""The simulated world: virtual time, processes, the network between them, the injected faults, and the trace of it all.

Every event is an entry in one queue, ordered by time and then by the order of insertion. All random choices come from
the seed. Each process has a production `Node`; the world carries its messages, and keeps the clocks and the register.

"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash
from msgspec import UNSET

from holdfast.comms.transport.base import Peer
from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.ft.membership.events import LEFT, EpochHeard
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.topology import Shape, observers
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.node import messages
from holdfast.harness.invariants import Event
from holdfast.harness.simulate.core.faults import AtPoint, Fault, inject
from holdfast.harness.simulate.core.meetings import Meetings
from holdfast.harness.simulate.core.network import Paths
from holdfast.harness.simulate.core.ports import SimulatedRegister
from holdfast.harness.simulate.core.process import SimulatedProcess
from holdfast.harness.simulate.core.schedule import Schedule
from holdfast.harness.simulate.core.worker import SimulatedSession

LINES_AT_ONCE = 1000

TraceWriter = Callable[[str], object]


class Trace:
    """Hashes lines, and passes each to `writer` if there is one. Keeps only the hash."""

    def __init__(self, writer: TraceWriter | None) -> None:
        self._writer = writer
        self._hash = xxhash.xxh3_128()
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= LINES_AT_ONCE:
            self._hash_lines()
        if self._writer is not None:
            self._writer(line)

    def hash(self) -> str:
        """The hash of all lines so far."""
        self._hash_lines()
        return self._hash.hexdigest()

    def _hash_lines(self) -> None:
        self._hash.update("".join(self._lines).encode())
        self._lines.clear()


UNTOLD = ("members", "min_size", "time", "process", "pid")
"""Fields of events that the trace omits, because they follow from the rest."""
EARLY_BEATS = 3
"""How many heartbeat intervals before a fault a quiet world begins to send heartbeats."""

MOST_DECODED = 100_000
"""The most messages that are kept decoded: a message that many receive is decoded once."""

Observer = Callable[[Event], None]


class World:
    """One run of a `Schedule`. `observe` gets the events that processes would log, `trace` a line for each event.

    `quiet`, for many ranks, leaves out heartbeats that change nothing.
    """

    def __init__(
        self, schedule: Schedule, observe: Observer | None = None, trace: TraceWriter | None = None, quiet: bool = False
    ) -> None:
        self.schedule, self.layout, self.network, self.quiet = schedule, schedule.layout, schedule.network, quiet
        self.rng = random.Random(schedule.seed)
        self.now = 0.0
        self.events = 0
        self.messages = 0
        self.paths = Paths(schedule.network, random.Random(schedule.seed ^ 0x5EED))
        self.meetings = Meetings(self)
        self.processes: list[SimulatedProcess] = []
        self.register = SimulatedRegister(None)
        if quiet:
            self.register.on_write = lambda view: self.after(schedule.layout.heartbeat, self._sweep)
        self._observe, self._trace = observe, Trace(trace)
        self._cores = [0.0] * schedule.machine.cores
        """For each core of the machine, until when it is taken."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._silent = False
        self._by_id: dict[str, SimulatedProcess] = {}
        self._hosts: list[list[SimulatedProcess]] = [[] for _ in range(self.layout.hosts)]
        self.clocks = [HostClock() for _ in range(self.layout.hosts)]
        self.refusing = Counter[int]()
        """The hosts whose kernel refuses to send signals."""
        self._gone: set[int] = set()
        self._decoded: dict[tuple[str, bytes], messages.Message] = {}
        self._points: list[tuple[AtPoint, list[int]]] = []
        layout = schedule.layout
        self._job = Job("job", layout.ranks, layout.min_size, layout.ranks, ("gloo",), "gloo", on_death=layout.on_death)
        self._begin()

    # Setting up -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        layout = self.layout
        self.say("harness", 0, events.SimulationBegun(ranks=layout.ranks, hosts=layout.hosts))
        members = [self._new_member(number, layout.host_of(number)) for number in range(layout.ranks + layout.spares)]
        view: View | None = None
        if not layout.form:
            reason = f"all {counted(layout.ranks, 'member')} are here"
            view = View(1, "running", tuple(members[: layout.ranks]), self._job, reason)
            self.register.view = view
        for number, member in enumerate(members):
            self._start(number, layout.host_of(number), member, view)
        for fault in self.schedule.faults:
            if isinstance(fault, AtPoint):
                self._points.append((fault, [fault.nth]))
            else:
                self.after(fault.at, inject, self, fault)
                if self.quiet:
                    self.after(max(0.0, fault.at - EARLY_BEATS * layout.heartbeat), self.wake, fault)

    def _new_member(self, number: int, host: int) -> Member:
        name = f"h{host}"
        return Member(f"p{number}", f"{name}:{7000 + number}", Peer(name, number + 1, 1))

    def _start(self, number: int, host: int, member: Member, view: View | None) -> None:
        job = msgspec.structs.replace(self._job, backend="") if self.layout.form else self._job
        core = Membership(member, job, self.layout.timeouts(), shape=Shape(mesh=self.layout.mesh))
        process = SimulatedProcess(self, number, host, core)
        self.processes.append(process)
        self._by_id[member.id] = process
        self._hosts[host].append(process)
        if self.layout.steps:
            process.worker = SimulatedSession(process, self.layout)
        if self.quiet:  # all processes have read the register
            self._silent = True
            process.begin(view)
            self._silent = False
            return
        self.at(self.now + self.rng.random() * self.layout.heartbeat * 0.2, process, process.begin, view)
        self.at(self.now + self.rng.random() * self.layout.heartbeat, process, process.node.watch)

    def wake(self, fault: Fault) -> None:
        """In a quiet world, start the heartbeats of a fault's targets and of their observers some time before it.

        All other heartbeats would change nothing.
        """
        doomed = [process for host in fault.silenced(self.layout) for process in self._hosts[host]]
        loud = {process.number: process for process in doomed}
        for process in doomed:
            loud.update({self._by_id[m.id].number: self._by_id[m.id] for m in process.core.watched()})
        for process in loud.values():
            if not process.loud and process.alive:
                process.loud = True
                self.at(self.now + self.rng.random() * self.layout.heartbeat, process, process.node.watch)

    def _sweep(self) -> None:
        """In a quiet world, let members that missed a new view show their epoch, one heartbeat interval after it."""
        behind = self.behind()
        for process in behind:
            view = process.core.view
            if view is None:
                continue
            for member in process.core.watched():
                other = self._by_id[member.id]
                if not self.paths.loses(process.host, other.host, self.now):
                    delay = self.paths.latency(process.host, other.host)
                    self.at(self.now + delay, other, other.node.feed, EpochHeard(process.member, view.epoch))
        if behind:
            self.after(self.layout.heartbeat, self._sweep)

    def behind(self) -> list[SimulatedProcess]:
        """The processes in the job that do not know the newest view."""
        epoch = self.register.epoch
        return [p for p in self.processes if p.alive and not p.core.ended and _epoch(p.core.view) < epoch]

    def start_another(self, host: int) -> None:
        """Start a process on `host`, which reads the register and asks to join."""
        number = len(self.processes)
        self._start(number, host, self._new_member(number, host), self.register.view)

    # Time -----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, act, args))

    def at(self, time: float, process: SimulatedProcess, act: Callable[..., None], *args: Any) -> None:
        """Let `process` call `act` at `time`, or when its pause is over."""
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, self._act, (process, act, args)))

    def work(
        self, time: float, process: SimulatedProcess, seconds: float, act: Callable[..., None], *args: Any
    ) -> None:
        """Let `process` call `act` once it has had a core of the machine for `seconds`, from `time` on."""
        if self._cores and seconds:
            self.at(time, process, self._take_core, process, seconds, act, args)
        else:
            self.at(time, process, act, *args)

    def _take_core(
        self, process: SimulatedProcess, seconds: float, act: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        process.busy_until = max(self.now, self._cores[0], process.busy_until) + seconds
        heapq.heapreplace(self._cores, process.busy_until)
        self.at(process.busy_until, process, act, *args)

    def _act(self, process: SimulatedProcess, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not process.alive:
            return
        if process.paused_until > self.now:
            process.backlog.append((act, args))
            return
        try:
            act(*args)
        except Exception as error:
            self.broken(process, error)
        if process.alive:
            process.settle()

    @property
    def pending(self) -> int:
        """The number of events in the queue."""
        return len(self._queue)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Process events up to time `until`, or until `stop()` is true after an event."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, act, args = pop(queue)
            self.events += 1
            act(*args)
            if stop():
                return
        self.now = max(self.now, until)

    def resume(self, process: SimulatedProcess) -> None:
        """End a process's pause: handle its backlog in order."""
        if process.paused_until > self.now or not process.alive:
            return
        backlog, process.backlog = process.backlog, []
        for act, args in backlog:
            self._act(process, act, args)

    # Trace and events -----------------------------------------------------------------------------------------

    def trace(self, kind: str, who: str, what: str) -> None:
        """Add a line to the trace."""
        self._trace.add(f"{self.now:.7f} {kind} {who} {what}\n")

    def trace_hash(self) -> str:
        """The hash of all events so far."""
        return self._trace.hash()

    def emit(self, process: SimulatedProcess, event: Event) -> None:
        """Emit an event as the process would log it."""
        if isinstance(event, events.MemberSuspected):
            event = msgspec.structs.replace(event, of=self.living_observers(process, event.member))
        self.say(process.member.id, process.number, event)

    def say(self, who: str, pid: int, event: Event) -> None:
        words = ""
        for name in event.__struct_fields__:
            if name not in UNTOLD and (value := getattr(event, name)) is not UNSET:
                words += f"{name}={value} "
        self.trace(event.kind, who, words)
        if self._observe is not None:
            self._observe(events.stamped(event, who, pid, self.now))

    def broken(self, process: SimulatedProcess, error: Exception) -> None:
        """Record that a process raised an error in its own code: a bug."""
        self.emit(process, events.CoreBroken(error=f"{type(error).__name__}: {error}"))
        self.kill(process, "its core is broken")

    # Processes ------------------------------------------------------------------------------------------------

    def process_of(self, member_id: str) -> SimulatedProcess:
        return self._by_id[member_id]

    def find(self, member_id: str) -> SimulatedProcess | None:
        return self._by_id.get(member_id)

    def is_gone(self, host: int) -> bool:
        """Whether a host has ended, with its kernel: nothing answers there any more."""
        return host in self._gone

    def lose_host(self, host: int) -> None:
        """End a host, and all its processes with it; no other process is told."""
        self._gone.add(host)
        for process in self._hosts[host]:
            if process.alive:
                process.alive = False
                process.backlog.clear()
                self.emit(process, events.ProcessDied(why="its host is gone"))

    def on_host(self, host: int) -> list[SimulatedProcess]:
        return self._hosts[host]

    def kill(self, process: SimulatedProcess, why: str) -> None:
        """SIGKILL a process. The kernel closes its connections, and informs those on its host that watch it."""
        if not process.alive:
            return
        process.alive = False
        process.backlog.clear()
        self.emit(process, events.ProcessDied(why=why))
        process.links.close()
        if self.layout.on_death != "rebuild":
            self.after(self.schedule.machine.gone, self.meetings.gone, process.member.id)
        for other in self._hosts[process.host]:
            if other.alive:
                other.watch.ended(process.member.id)

    def leave(self, process: SimulatedProcess, why: str) -> None:
        """End a process with a farewell, as a session does when it cannot go on."""
        self.emit(process, events.SessionFailed(error=why))
        process.node.leave(why)
        self.after(0.0, self.kill, process, LEFT + why)

    def living_observers(self, process: SimulatedProcess, member_id: str) -> int:
        """How many living processes observe the member, by the newest view of `process`."""
        view = process.core.view
        rank = view.rank_of(member_id) if view is not None else None
        if view is None or rank is None:
            return 0
        members = observers(view, view.members[rank], process.core.shape)
        return sum(self._by_id[m.id].alive and not self._by_id[m.id].ended for m in members)

    def reach(self, process: SimulatedProcess, point: str, epoch: int, then: Callable[[], None]) -> None:
        """Continue with `then`, unless a fault is armed at this point."""
        for fault, left in self._points:
            if fault.point == point and self.now >= fault.at and left[0] > 0:
                left[0] -= 1
                if left[0] == 0:
                    fault.strike(self, process)
        if not process.alive:
            return
        if process.paused_until > self.now:
            process.backlog.append((then, ()))
            return
        then()

    # Messages -------------------------------------------------------------------------------------------------

    def send(self, sender: SimulatedProcess, member_id: str, method: str, body: bytes) -> None:
        """Send a message. It may arrive late, twice or never."""
        receiver = self._by_id.get(member_id)
        if receiver is None or self._silent:
            return
        if method == "beat":
            self._send_beat(sender, receiver, body)
            return
        sender.sent += 1
        self.messages += 1
        sender.bytes += len(body)
        self._carry(sender, receiver, (method, body), 0)

    def _carry(self, sender: SimulatedProcess, receiver: SimulatedProcess, notice: messages.Notice, tries: int) -> None:
        source, target = sender.host, receiver.host
        slow = sender.slow + receiver.slow
        cut = self.paths.is_cut(source, target)
        if cut or self.paths.loses(source, target, self.now):
            wait = self.network.retransmit * 2**tries
            if wait and tries < 4:
                self.at(self.now + wait, sender, self._carry, sender, receiver, notice, tries + 1)
            return
        for _ in range(self.paths.copies()):
            delay = self.paths.latency(source, target) + slow
            self.at(self.now + delay, receiver, self._receive, sender, receiver, notice)

    def _receive(self, sender: SimulatedProcess, receiver: SimulatedProcess, notice: messages.Notice) -> None:
        machine = self.schedule.machine
        cost = machine.further if receiver.busy_until > self.now else machine.message
        self.work(self.now, receiver, cost, self._deliver, sender, receiver, *notice)

    def _deliver(self, sender: SimulatedProcess, receiver: SimulatedProcess, method: str, body: bytes) -> None:
        receiver.received += 1
        receiver.bytes += len(body)
        self.trace("message", f"{sender.member.id}>{receiver.member.id}", method)
        before = receiver.core.view
        receiver.node.hear(sender.member.id, self._decode(method, body))
        if receiver.core.view is not before:
            receiver.hops = sender.hops + 1

    def reset_counts(self) -> None:
        """Count messages and bytes from now on."""
        for process in self.processes:
            process.sent = process.received = process.bytes = 0

    def _decode(self, method: str, body: bytes) -> messages.Message:
        found = self._decoded.get((method, body))
        if found is None:
            found = self._decoded[method, body] = messages.decode(method, body)
            if len(self._decoded) > MOST_DECODED:
                self._decoded.pop(next(iter(self._decoded)))
        return found

    def _send_beat(self, sender: SimulatedProcess, receiver: SimulatedProcess, body: bytes) -> None:
        """Send a heartbeat. A lost one is not sent again."""
        source, target = sender.host, receiver.host
        if not receiver.alive or self.paths.is_cut(source, target) or self.paths.loses(source, target, self.now):
            return
        delay = self.paths.latency(source, target) + sender.slow + receiver.slow
        beat = self._decode("beat", body)
        self.at(self.now + delay, receiver, receiver.node.hear, sender.member.id, beat)


class HostClock:
    """The clock of a host. It may run faster or slower than the world's, and jump forward; it never goes back."""

    __slots__ = ("_here", "_there", "rate")

    def __init__(self) -> None:
        self.rate = 1.0
        self._here = self._there = 0.0

    def read(self, now: float) -> float:
        """What it shows at `now`, the time of the world."""
        return self._there + (now - self._here) * self.rate

    def drift(self, now: float, share: float) -> None:
        """From now on run faster by `share`."""
        self._here, self._there, self.rate = now, self.read(now), 1.0 + share

    def jump(self, now: float, seconds: float) -> None:
        """Show `seconds` more from now on."""
        self._here, self._there = now, self.read(now) + seconds


def _epoch(view: View | None) -> int:
    return 0 if view is None else view.epoch
