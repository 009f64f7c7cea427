"""One simulated process: carries out in virtual time what the production core, detectors and `EpochGuard` ask for.

This is the counterpart of `ft.runtime.reactor`: it moves events and effects, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.comms.errors import HoldfastError, Mismatch, PeerFailed, Revoked, StaleEpoch
from holdfast.ft import events
from holdfast.ft.detectors.detector import DetectorContext
from holdfast.ft.detectors.observers import ObserversDetector
from holdfast.ft.detectors.silence import SilenceTracker
from holdfast.ft.detectors.stragglers import OpPosition
from holdfast.ft.membership.effects import (
    Announce,
    AnnounceSelf,
    Effect,
    Evicted,
    Fence,
    Install,
    Propose,
    ReadRegister,
    Refused,
    ReportDeaths,
    ReportSuspicions,
    Revoke,
)
from holdfast.ft.membership.events import (
    CasFailed,
    CasLost,
    CasWon,
    Cleared,
    Death,
    EpochHeard,
    Event,
    ProvenDeaths,
    SpareAnnounced,
    Suspicion,
    Tick,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.evidence_reporting import another_proposes_first
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.view import Member, View
from holdfast.ft.membership.view_delta import delta_between
from holdfast.ft.runtime.epoch_guard import EpochGuard
from holdfast.harness.simulate.core.worker import SimulatedSession

if TYPE_CHECKING:
    import asyncio

    from holdfast.harness.simulate.core.world import World

LOOKS_A_HEARTBEAT = 4
FOLLOW_SECONDS = 0.002
ANNOUNCED_SECONDS, DEFER_SECONDS = (0.003, 0.05), (0.005, 0.05)
"""The ranges of delay of what the runtime does a moment later: it may also come late."""


class SimulatedProcess:
    """Process number `number`.

    `backlog` has the events that wait while it is paused. `hops` is its distance from the proposer when it learnt of
    its newest view.
    """

    __slots__ = (
        "alive",
        "announced",
        "backlog",
        "beat_token",
        "bytes",
        "core",
        "deferred",
        "ended",
        "follow_wanted",
        "followers",
        "guard",
        "hops",
        "host",
        "looking",
        "loud",
        "member",
        "number",
        "observing",
        "paused_until",
        "proposal",
        "rate",
        "received",
        "sent",
        "set_at",
        "silence",
        "slow",
        "timer",
        "timer_at",
        "was_spare",
        "watched",
        "word",
        "worker",
        "world",
    )

    def __init__(self, world: World, number: int, host: int, member: Member, core: Membership) -> None:
        self.world, self.number, self.host, self.member, self.core = world, number, host, member, core
        self.alive, self.ended, self.was_spare = True, False, False
        self.paused_until, self.slow = 0.0, 0.0
        self.rate, self.set_at = 1.0, (0.0, 0.0)
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.timer, self.timer_at = 0, -1.0
        self.guard = EpochGuard(member.id, self)
        self.announced: tuple[int, frozenset[str]] = (0, frozenset())
        self.word = (0, b"")
        self.deferred: tuple[Death, ...] = ()
        self.silence: SilenceTracker | None = None
        self.observing: ObserversDetector | None = None
        self.watched: dict[str, Member] = {}
        self.followers: dict[str, None] = {}
        self.follow_wanted = self.looking = False
        self.loud = not world.quiet
        self.proposal = 0
        self.sent = self.received = self.bytes = self.hops = 0
        self.worker: SimulatedSession | None = None

    # Time -----------------------------------------------------------------------------------------------------

    def local(self) -> float:
        """The current time on this process's clock."""
        here, there = self.set_at
        return there + (self.world.now - here) * self.rate

    def drift(self, share: float) -> None:
        self.set_at, self.rate = (self.world.now, self.local()), 1.0 + share

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` after `seconds` of this process's clock, if it then lives and is not paused."""
        self.world.at(self.world.now + seconds / self.rate, self, act, *args)

    # The core -------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        before = self.core
        try:
            core, effects = before.on(event, self.local())
        except Exception as error:
            self.world.broken(self, error)
            return
        self.core = core
        for effect in effects:
            self._perform(effect)
            if not self.alive:
                return
        if core.view is not before.view or core.spares is not before.spares:
            self._follow_soon()
        if core.wake_at is not None and core.wake_at != self.timer_at:
            self.timer += 1
            self.timer_at = core.wake_at
            self.after(max(0.0, core.wake_at - self.local()), self._tick, self.timer)
        elif core.wake_at is None:
            self.timer_at = -1.0
        if self.worker is not None and effects:
            self.worker.look()

    def _tick(self, timer: int) -> None:
        if timer == self.timer and self.core.wake_at is not None:
            self.timer_at = -1.0
            self.feed(Tick())

    def _perform(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Revoke():
                self._revoke(effect)
            case Propose(expected, view):
                world.emit(self, events.ViewProposed(epoch=view.epoch, phase=view.phase, reason=view.reason))
                self.reach("rebuild.before_propose", lambda: self._ask_register(expected, view))
            case Announce(view, to, change):
                told: Event = (
                    ViewRead(view, self.member.id) if change is None else ViewDeltaReceived(change, self.member.id)
                )
                epoch, announced_to = self.announced
                if epoch == view.epoch:
                    later = tuple(member for member in to if member.id in announced_to)
                    to = tuple(member for member in to if member.id not in announced_to)
                    self.after(world.rng.choice(ANNOUNCED_SECONDS), world.send_all, self, later, told)
                world.send_all(self, to, told)
            case ReadRegister():
                world.read_register(self)
            case ReportDeaths(deaths, to):
                world.send_all(self, to, ProvenDeaths(deaths))
            case ReportSuspicions(seen, to):
                for word in seen:
                    world.send_all(self, to, word)
            case AnnounceSelf(view, to):
                if not self.was_spare:
                    self.was_spare = True
                    world.emit(self, events.SpareWaits(epoch=view.epoch))
                world.send_all(self, to, SpareAnnounced(self.member))
            case Install(view):
                self._install(view)
            case Evicted(view, reason):
                world.emit(self, events.WasEvicted(epoch=view.epoch, reason=reason))
                self.end(StaleEpoch(f"evicted in epoch {view.epoch}: {reason}"))
            case Refused(reason):
                self.end(Mismatch(f"cannot join: {reason}"))
            case Fence(member, reason):
                world.emit(self, events.MemberFenced(member=member.id, reason=reason))
                world.after(world.network.local, world.kill_member, member.id, f"fenced: {reason}")

    def _revoke(self, effect: Revoke) -> None:
        view = self.guard.view
        error: HoldfastError
        if effect.dead and view is not None and view.epoch == effect.epoch:
            error = PeerFailed(self.world.ranks_of(effect.dead, view), effect.reason)
        else:
            error = Revoked(effect.epoch, effect.reason)
        if self.guard.revoke(effect.epoch, error, effect.reason):
            self._abort_ops(effect.epoch)

    def installed(self, view: View) -> None:
        """Called by the guard once it has installed `view`."""
        self.world.installed(self, view)

    def revoked(self, epoch: int, reason: str) -> None:
        """Called by the guard once it has revoked the epoch."""
        self.world.emit(self, events.EpochRevoked(epoch=epoch, reason=reason))

    def _install(self, view: View) -> None:
        if view.phase == "failed":
            self.end(HoldfastError(f"the job has ended: {view.reason}"))
        self.guard.install(view)

    def end(self, error: HoldfastError) -> None:
        """End this process's part in the job, with `error`."""
        self.ended = True
        self.guard.end(error)
        if self.worker is not None:
            self.worker.look()

    # The register ---------------------------------------------------------------------------------------------

    def _ask_register(self, expected: int, view: View) -> None:
        self.proposal += 1
        number = self.proposal
        late = CasFailed("the register did not answer in time")
        self.after(self.core.timeouts.rebuild, self.answered, number, late)
        self.world.propose(self, number, expected, view)

    def answered(self, number: int, event: CasWon | CasLost | CasFailed) -> None:
        """Handle the register's answer to proposal `number`; only the first counts."""
        if number != self.proposal:
            return
        self.proposal += 1
        if isinstance(event, CasFailed):
            self.world.emit(self, events.RegisterUnreachable(reason=event.reason))
        if isinstance(event, CasWon):
            self.reach("rebuild.after_propose", lambda: self._won(event))
        else:
            self.feed(event)

    def _won(self, event: CasWon) -> None:
        self._announce(event.view)
        self.feed(event)

    def _announce(self, view: View) -> None:
        """In a job of one host, announce the next view where the others wait."""
        before = self.guard.view
        if self.worker is None or before is None or view.phase != "running" or len(before.hosts) > 1:
            return
        change = delta_between(before, view)
        if change is None:
            return
        self.announced = (view.epoch, frozenset(before.ranks))
        for member in before.members:
            other = self.world.process_of(member.id)
            other.word = (before.epoch, change.encode())
            self.world.at(self.world.now, other, other.adopt_announced_view)

    def adopt_announced_view(self) -> None:
        """If the session waits in an op, adopt a view that was announced there."""
        worker, (epoch, word) = self.worker, self.word
        if worker is not None and worker.stage == "op" and worker.epoch == epoch:
            self.guard.adopt_announced_view(word)
            self._abort_ops(epoch)
            worker.look()

    def reach(self, point: str, then: Callable[[], None]) -> None:
        """Continue with `then`, unless a fault is injected at this point."""
        view = self.guard.view
        self.world.reach(self, point, view.epoch if view is not None else 0, then)

    # Watched members ------------------------------------------------------------------------------------------

    def _follow_soon(self) -> None:
        if not self.follow_wanted and self.loud:
            self.follow_wanted = True
            self.after(FOLLOW_SECONDS, self.follow)

    def follow(self) -> None:
        """Watch exactly the members that the core asks for. A dead one of this host is noticed at once."""
        self.follow_wanted = False
        watched = {member.id: member for member in self.core.watched()}
        for member_id in self.watched:
            if member_id not in watched:
                self.world.process_of(member_id).followers.pop(self.member.id, None)
        for member_id, member in watched.items():
            if member_id in self.watched:
                continue
            other = self.world.process_of(member_id)
            other.followers[self.member.id] = None
            if not other.alive and member.peer.host == self.member.peer.host:
                self.world.prove(self, (member_id,))
        self.watched = watched
        here = [member for member in watched.values() if member.peer.host == self.member.peer.host]
        self._detectors()[0].follow(here, self.local())
        self._detectors()[1].follow(self.core.view, tuple(watched.values()))

    def _detectors(self) -> tuple[SilenceTracker, ObserversDetector]:
        """The detectors for its own host and for others, constructed at first use."""
        if self.silence is None or self.observing is None:
            self.silence = SilenceTracker(self.member, self.core.timeouts, self.world.is_stopped)
            self.observing = ObserversDetector(
                DetectorContext(
                    me=self.member,
                    timeouts=self.core.timeouts,
                    loop=cast("asyncio.AbstractEventLoop", LocalClock(self)),
                    tell=self.hear,
                    stop=self._stop,
                    resign=lambda reason: self.world.leave(self, reason),
                    note=self._note,
                    place=lambda: OpPosition(0, 0, False),
                    lost=lambda member_id: member_id in self.core.evidence.lost,
                )
            )
        return self.silence, self.observing

    def _stop(self, reason: str) -> None:
        """End the epoch in this process, without agreement."""
        view = self.guard.view
        if view is not None and self.guard.revoke(view.epoch, Revoked(view.epoch, reason), reason):
            self._abort_ops(view.epoch)
            if self.worker is not None:
                self.worker.look()

    def _abort_ops(self, epoch: int) -> None:
        if self.worker is not None:
            self.worker.interrupted = epoch

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.MemberSuspected):
            event = msgspec.structs.replace(event, of=self.world.living_observers(self, event.member))
        self.world.emit(self, event)

    def prove(self, deaths: tuple[Death, ...]) -> None:
        """Handle the kernel's report that these processes have ended."""
        self.deferred += deaths
        gone = {death.id for death in self.deferred}
        if another_proposes_first(self.core.view, self.member, gone | self.core.evidence.lost.keys()):
            self.after(self.world.rng.choice(DEFER_SECONDS), self._bury_deferred)
        else:
            self._bury_deferred()

    def _bury_deferred(self) -> None:
        if self.deferred:
            deaths, self.deferred = self.deferred, ()
            self.hear(ProvenDeaths(deaths))

    def hear(self, event: Event) -> None:
        """Handle a finding of a detector of this or another process."""
        if isinstance(event, ProvenDeaths):
            ids = tuple(death.id for death in event.deaths)
            self.world.emit(self, events.DeathsDetected(members=ids, evidence=event.deaths[0].evidence))
        elif self.observing is not None:
            if isinstance(event, Suspicion) and event.observer != self.member.id:
                self.observing.reported(event.observer, event.member, event.evidence, self.local())
            elif isinstance(event, Cleared) and event.observer != self.member.id:
                self.observing.reported(event.observer, event.member, None, self.local())
        self.feed(event)

    # Heartbeats -----------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Called once a heartbeat interval: send heartbeats with the epoch, check silent members, read the register."""
        view = self.core.view
        epoch = view.epoch if view is not None else 0
        if not self.core.ended:  # a quiet world leaves out only what changes nothing: see `World.wake`
            for member_id in {**self.watched, **self.followers}:
                self.world.beat(self, member_id, epoch)
            if self.world.register.epoch > epoch:
                self.world.read_register(self)
        self.look()
        self.after(self.core.timeouts.heartbeat, self.beat)

    def hear_beat(self, sender: SimulatedProcess, epoch: int) -> None:
        if self.silence is None or self.observing is None:
            return
        now = self.local()
        for finding in self.silence.hear(sender.member.id, now):
            self.hear(finding)
        self.observing.heard(sender.member.id, now)
        view = self.core.view
        if view is not None and epoch not in (0, view.epoch) and sender.member.id in view.ranks:
            self.feed(EpochHeard(sender.member, epoch))

    def look(self) -> None:
        """Check the silent members, and again soon if there are any."""
        if self.silence is None or self.observing is None or self.core.ended:
            return
        now = self.local()
        if self.world.quiet:
            self._hear_the_quiet(now)
        for finding in self.silence.look(now):
            self.hear(finding)
        self.observing.look(now)
        if (self.silence.any_silent or self.observing.doubtful) and not self.looking:
            self.looking = True
            self.after(self.core.timeouts.heartbeat / LOOKS_A_HEARTBEAT, self._look_again)

    def _hear_the_quiet(self, now: float) -> None:
        """In a quiet world, count members untouched by faults as heard: they send no heartbeats."""
        assert self.silence is not None and self.observing is not None
        for member_id in self.watched:
            other = self.world.process_of(member_id)
            if not other.loud:
                self.silence.hear(member_id, now)
                self.observing.heard(member_id, now)

    def _look_again(self) -> None:
        self.looking = False
        self.look()


class LocalClock:
    """The part of an event loop that a detector needs: the time on its process's clock."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def time(self) -> float:
        return self._process.local()
