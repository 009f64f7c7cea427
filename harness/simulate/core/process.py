"""One simulated process: a production `Node` on simulated ports, its clock, and its session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from holdfast.comms.errors import HoldfastError, Revoked
from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector
from holdfast.ft.membership.events import Event as MembershipEvent
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.view import View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.node import Node
from holdfast.ft.ports import Ports
from holdfast.harness.simulate.core.ports import (
    SimulatedLinks,
    SimulatedProcesses,
    SimulatedRegisterPort,
    SimulatedTime,
    detectors,
)
from holdfast.harness.simulate.core.worker import SimulatedSession

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator
    from holdfast.harness.simulate.core.world import World


class SimulatedProcess:
    """Process number `number`.

    `backlog` has the events that wait while it is paused; `slow` is what every message to and from it takes longer. It
    has a core of the machine until `busy_until`.
    `loud` is False for a process that sends no heartbeats. `hops` is its distance from the proposer when it learnt
    of its newest view.
    """

    __slots__ = (
        "alive",
        "announced",
        "backlog",
        "busy_until",
        "bytes",
        "closing",
        "detectors",
        "guard",
        "hops",
        "host",
        "links",
        "loud",
        "member",
        "node",
        "number",
        "page",
        "paused_until",
        "received",
        "sent",
        "slow",
        "watch",
        "worker",
        "world",
    )

    def __init__(self, world: World, number: int, host: int, core: Membership) -> None:
        self.world, self.number, self.host, self.member = world, number, host, core.me
        self.alive, self.closing = True, False
        self.paused_until, self.busy_until, self.slow = 0.0, 0.0, 0.0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.loud = not world.quiet
        self.sent = self.received = self.bytes = self.hops = 0
        self.announced = (0, b"")
        """The epoch in whose ops the next view was announced, and the announcement."""
        self.guard = EpochGuard(core.me.id, self._emit)
        self.links = SimulatedLinks(self)
        processes = SimulatedProcesses(self)
        self.page, self.watch = processes.heartbeat, processes.followed
        ports = Ports(SimulatedTime(self), self.links, SimulatedRegisterPort(self), processes)
        self.detectors: dict[str, Detector] = {}
        self.node = Node(core, self.guard, ports, self._emit, detectors(self.detectors), self.reach)
        self.worker: SimulatedSession | None = None

    @property
    def core(self) -> Membership:
        """The membership as this process knows it."""
        return self.node.core

    @property
    def ended(self) -> bool:
        """Whether an error has ended this process's part in the job."""
        return self.guard.ended

    @property
    def was_spare(self) -> bool:
        """Whether this process has waited outside of a running view."""
        return self.node.was_spare

    def feed(self, event: MembershipEvent) -> None:
        """Pass an event of this process's session to its membership."""
        self.node.feed(event)

    def end(self, error: HoldfastError) -> None:
        """End this process's part in the job, with `error`."""
        self.guard.end(error)

    def begin(self, view: View | None) -> None:
        """Begin as a session does that is entered and asked for its steps at once."""
        self.node.ready()
        self.node.begin(view)

    def break_detector(self, name: str) -> None:
        """Let a detector raise whenever it looks."""

        def look(now: float) -> None:
            raise OSError(f"the detector {name!r} is broken")

        if name in self.detectors:
            self.detectors[name].look = look  # type: ignore[method-assign]

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` after `seconds` of this process's clock, if it then lives and is not paused."""
        self.world.at(self.world.now + seconds / self.world.clocks[self.host].rate, self, act, *args)

    def settle(self) -> None:
        """Called after all that happens in this process: its session goes on, or closes the node if it is over."""
        worker = self.worker
        if worker is not None:
            worker.look()
            over = worker.stage == "over"
        else:
            over = bool(self.core.ended) or self.guard.ended
        if over and not self.closing:
            self.closing = True
            self.world.at(self.world.now, self, self._close)

    def _close(self) -> None:
        self.node.close()
        self.links.close()
        if self.node.has_left:
            if self.worker is None:
                self._emit(events.SessionFailed(error=str(self.guard.why_over(0))))
            self.world.kill(self, "it left")

    def _emit(self, event: events.Event) -> None:
        self.world.emit(self, event)

    def reach(self, point: str, then: Callable[[], None]) -> None:
        """Continue with `then`, unless a fault is injected at this point."""
        view = self.guard.view
        self.world.reach(self, point, view.epoch if view is not None else 0, then)

    # Announcements inside of ops ------------------------------------------------------------------------------

    def exchange(self, view: View, then: Callable[[], None]) -> None:
        """Exchange addresses with all members of `view` over the rendezvous table; `then` is called once all are here.

        If the epoch ends before, it is not called.
        """
        table = self.node.sharing.table
        keys = view.remember("addresses", view.members, lambda: [f"address/{member.id}" for member in view.members])
        world, cost = self.world, self.world.schedule.machine.connect
        with contextlib.suppress(Revoked):
            table.put(view.epoch, {f"address/{self.member.id}": self.member.address.encode()})
            table.when(
                view.epoch, keys, lambda error: world.work(world.now, self, cost, then) if error is None else None
            )

    def connected(self, view: View) -> None:
        """The communicator of `view` stands: its ops end with the epoch, and can announce the next view."""
        if self.worker is not None and not self.guard.is_over(view.epoch):
            self.guard.bind(cast("Communicator", SimulatedCommunicator(self, self.worker, view)))

    def adopt_announced_view(self) -> None:
        """If the session waits in an op, adopt a view that was announced there."""
        worker, (epoch, announced) = self.worker, self.announced
        if worker is not None and worker.stage == "op" and worker.epoch == epoch:
            self.guard.adopt_announced_view(announced)
            self.guard.end_ops()
            worker.look()


class SimulatedCommunicator:
    """What an `EpochGuard` needs of a communicator. On one host, ranks that wait in its ops learn of the next view."""

    def __init__(self, process: SimulatedProcess, worker: SimulatedSession, view: View) -> None:
        self.epoch, self.transport = view.epoch, self
        self._process, self._worker, self._view = process, worker, view

    @property
    def progress(self) -> tuple[int, bool]:
        return self._worker.entered, self._worker.stage == "op"

    def abort(self, error: Exception) -> None:
        self._worker.interrupted = self.epoch

    def rest(self) -> None:
        """Nothing spins in virtual time."""

    def announce(self, announced: bytes, _: Exception) -> bool:
        if len(self._view.hosts) > 1:
            return False
        world = self._process.world
        for member in self._view.members:
            other = world.process_of(member.id)
            other.announced = (self.epoch, announced)
            world.work(world.now, other, world.schedule.machine.message, other.adopt_announced_view)
        return True
