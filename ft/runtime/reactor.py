"""Runs the membership state machine of one process in an event loop.

Its events come from the kernel (pidfds), detectors, the other members, the register and timers. It carries out the
effects: revoke and install epochs in the session's `EpochGuard`, compare-and-set the register, notify the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor

from holdfast.comms.errors import HoldfastError, Mismatch, PeerFailed, Revoked, StaleEpoch
from holdfast.comms.plugins.registry import registry
from holdfast.comms.transport.liveness import is_gone, this_process
from holdfast.ft import events, faultpoints
from holdfast.ft.detectors.detector import DetectorContext
from holdfast.ft.detectors.process_watch import death_of
from holdfast.ft.detectors.stragglers import OpPosition
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.error_history import StepFailed
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
    CasWon,
    Death,
    EpochHeard,
    Event,
    ProvenDeaths,
    Started,
    Tick,
    ViewRead,
)
from holdfast.ft.membership.evidence_reporting import another_proposes_first
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Job, Member, View
from holdfast.ft.registers import RegisterAway
from holdfast.ft.rendezvous import handlers as rendezvous
from holdfast.ft.runtime import messages
from holdfast.ft.runtime.connections import MemberConnections
from holdfast.ft.runtime.epoch_guard import EpochGuard
from holdfast.ft.runtime.register import Register
from holdfast.ft.runtime.register_client import Answer, RegisterClient
from holdfast.ft.runtime.table_sharing import TableSharing, neighbours
from holdfast.ft.settings import Settings, one_host_backends
from holdfast.ft.telemetry.event_log import EventLog

FOLLOW_SECONDS, FOLLOW_FEWER_SECONDS = 0.002, 0.02
"""Delay from a new view to an update of the watched processes; the longer one if no process is new."""
DEFER_SECONDS = 0.005
"""Delay before this process acts on a death that another member of its host will act on first."""
CALM_BEATS, CALM_BEATS_A_MESSAGE = 20, 5
"""Heartbeats after a change of the view from which on processes of this host get one message in so many heartbeats."""
ANNOUNCED_SECONDS = 0.003
"""Delay before members that learn of a view inside their ops also get it as a message.

Processors are few while all members recover.
"""

WON_SECONDS = 0.001
"""Delay before this process's core learns that its proposal won, if all members of the view learn of it in their ops.
"""

_log = logging.getLogger("holdfast.ft")


class Reactor:
    """The membership of one process. Made and used in one event loop.

    `step` is passed to fault points. `was_spare` is True once this process has been outside of a running view: there it
    tells the members of itself once it is `ready`, or they would wait for it while it still prepares its steps.
    """

    def __init__(
        self,
        identity: str,
        settings: Settings,
        epoch_guard: EpochGuard,
        event_log: EventLog,
        register: Register,
        pool: Executor,
    ) -> None:
        self.step = -1
        self.was_spare = False
        self._has_left = False
        self._identity, self._settings, self._epoch_guard, self._events = identity, settings, epoch_guard, event_log
        self._loop = asyncio.get_running_loop()
        self.sharing = TableSharing(identity, self._loop, max(settings.timeouts.rebuild, settings.timeouts.operation))
        callbacks = messages.MessageCallbacks(
            core=self.feed,
            beat=self._hear_beat,
            deaths=self._handle_deaths,
            share=self.sharing.received,
            suspicion=self._hear_suspicion,
            detectors=self._hear_detectors,
        )
        self.links = MemberConnections(
            identity,
            key=settings.key,
            job=settings.name,
            handlers={
                **rendezvous.handlers(self.sharing.table, self.sharing.forward, self.sharing.delete),
                **messages.handlers(callbacks),
            },
            on_link=self._linked,
            on_refused=self._refused,
        )
        self.sharing.use(self.links)
        self._detectors: Detectors | None = None
        self._core: Membership | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._last_view: View | None = None
        self._calm = 0
        """The heartbeats since the view has changed."""
        self._depth = 0
        """How many calls of `feed` are open: an effect may feed the next event."""
        self._following = False
        """Whether an update of the watched processes is due."""
        self._register_client = RegisterClient(register, pool, settings.timeouts.rebuild, self.feed, self._answered)
        self._announced_self_to: dict[str, Member] = {}
        self._spare_since = 0
        self._is_ready = self._told_spare = False
        """Whether this process can do steps, and whether its event as a spare is written."""
        self._deferred: tuple[Death, ...] = ()
        """Deaths that another member of this host acts on first (`DEFER_SECONDS`)."""
        self._announced: tuple[int, frozenset[str]] = (0, frozenset())
        """The epoch that was announced inside of ops, and to which members: they get its message later."""
        self._unreported_win: CasWon | None = None
        """The register's answer that this process's core learns a moment later (`WON_SECONDS`)."""

    async def begin(self, host: str, job: Job, view: View | None, threads: tuple[int, ...]) -> None:
        """Listen on `host` and take part in `job`; `view` is what the register holds.

        `threads` are the kernel's numbers of threads of this process that end no sooner than this reactor.
        """
        address = await self.links.start(host)
        me = Member(self._identity, address, this_process(), threads)
        self._detectors = Detectors(
            DetectorContext(
                me=me,
                timeouts=self._settings.timeouts,
                loop=self._loop,
                tell=self._tell_core,
                stop=self._stop,
                resign=self._resign,
                note=self._events.emit,
                place=self._epoch_guard.place,
                lost=self._is_lost,
            ),
            list(registry().detectors.values()),
            self._send_detectors,
        )
        shape = Shape(mesh=self._settings.mesh)
        self._core = Membership(me, job, self._settings.timeouts, one_host_backends(job.backends), shape)
        self._events.emit(events.JoinRequested(address=address))
        self.feed(ViewRead(view))
        self.feed(Started())
        self._beat()

    @property
    def missed_heartbeats(self) -> int:
        """The number of heartbeats of others that did not arrive, so far. Thread-safe."""
        return 0 if self._detectors is None else self._detectors.missed

    def ahead(self, place: OpPosition) -> bool:
        """Whether another member of this host was seen to have entered more ops than `place` says. Thread-safe."""
        places = () if self._detectors is None else tuple(self._detectors.places.values())
        return any(there.epoch == place.epoch and there.entered > place.entered for there in places)

    async def end(self) -> None:
        """Close detectors, timers and connections. No event is handled afterwards."""
        self._core = None
        self._register_client.end()
        for timer in (self._timer, self._heartbeat_timer):
            if timer is not None:
                timer.cancel()
        if self._detectors is not None:
            self._detectors.close()
            self._detectors = None
        self.sharing.flush()
        await self.links.close()

    def leave(self, reason: str, error: str = "") -> None:
        """Tell the others that this process has left the job, as if it had died; `error` as in `Death`."""
        self._has_left = True
        self.links.notify_all(*messages.leave(reason, error))

    def feed(self, event: Event) -> None:
        """Pass one event to the state machine and carry out its effects."""
        self._feed_win()  # the answer that waits comes first, or the core would decide without it
        before = self._core
        if before is None:
            return
        self._core, effects = before.on(event, time.monotonic())
        self._depth += 1
        try:
            for effect in effects:
                self._perform(effect)
        except Exception as error:  # the core believes that the effect has happened: the process cannot go on
            _log.exception("an effect of %r failed", event)
            self._epoch_guard.end(
                HoldfastError(f"this process cannot go on in its job: {type(error).__name__}: {error}")
            )
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:  # notify the others before this process's own threads wake up
                self._epoch_guard.end_ops()
        if self._core.spares is not before.spares:
            for spare in self._core.spares:
                if spare not in before.spares:
                    self._events.emit(events.SpareWelcomed(spare=spare.id))
        if self._core.view is not before.view or self._core.spares is not before.spares:
            self._follow_soon(before)
        self._set_timer(self._core.wake_at)

    def _follow_soon(self, before: Membership) -> None:
        """Update the watched processes a moment later, after urgent work."""
        if not self._following:
            assert self._core is not None
            known = {member.id for member in before.watched()} | {self._identity}
            view = self._core.view
            is_known = view is not None and self._core.shape.is_mesh(view)
            is_known = is_known and all(member.id in known for member in self._core.watched())
            self._following = True
            self._loop.call_later(FOLLOW_FEWER_SECONDS if is_known else FOLLOW_SECONDS, self._follow)

    def _follow(self) -> None:
        self._following = False
        core = self._core
        if core is None or self._detectors is None:
            return
        watched = core.watched()
        view, mine = core.view, None
        self._detectors.follow(view, watched)
        if view is not None:
            mine = view.rank_of(self._identity)
        earlier = {m.id for m in view.members[:mine]} if view is not None else set[str]()
        linked = {m.id: m for m in watched}
        if view is not None and mine is not None:  # the rendezvous table is passed on along these
            linked.update({m.id: m for m in neighbours(view, mine)})
        self.links.follow(
            [m for m in linked.values() if m.id in earlier],
            [m for m in linked.values() if m.id not in earlier],
        )

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay = max(0.0, at - time.monotonic())
            self._timer = self._loop.call_later(delay, self.feed, Tick())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                self._revoke(effect)
            case Propose(expected, view):
                self._events.emit(events.ViewProposed(epoch=view.epoch, phase=view.phase, reason=view.reason))
                self._propose(expected, view)
            case Announce(view, to, None):
                self._announce_to(view, to, messages.install(view))
            case Announce(view, to, change):
                assert change is not None
                self._announce_to(view, to, messages.change(change))
            case ReadRegister():
                self._register_client.read()
            case ReportDeaths(deaths, to):
                self._tell(to, messages.deaths(deaths))
            case ReportSuspicions(seen, to):
                for word in seen:
                    self._tell(to, messages.suspicion(word))
            case AnnounceSelf(view, to):
                self.was_spare = True
                self._announced_self_to = {member.id: member for member in to}
                self._spare_since = view.epoch
                if self._is_ready:
                    self._announce_selves()
            case Install(view):
                self._install(view)
            case Evicted() if self._has_left:
                pass  # the others' next view is there before this process has closed: it says what was asked for
            case Evicted(view, reason):
                self._events.emit(events.WasEvicted(epoch=view.epoch, reason=reason))
                self._epoch_guard.end(StaleEpoch(f"evicted in epoch {view.epoch}: {reason}"))
            case Refused(reason):
                self._epoch_guard.end(Mismatch(f"cannot join job {self._settings.name!r}: {reason}"))
            case Fence(member, reason):
                self._fence(member, reason)

    def _fence(self, member: Member, reason: str, last: events.Event | None = None) -> None:
        """End a process of this host; again once a heartbeat, until its end is proved.

        `last` is the last event on it: an event is written when it changes from success to failure or back.
        """
        core = self._core
        if core is None or self._detectors is None:
            return
        if is_gone(member.peer):
            if any(m.id == member.id for m in core.watched()) and not self._is_lost(member.id):
                self._handle_deaths((death_of(member),))
            return
        try:
            self._detectors.fence(member)
        except OSError as error:
            if not isinstance(last, events.FenceFailed):
                why = f"SIGKILL to pid {member.peer.pid}: {error.strerror or error}"
                last = events.FenceFailed(member=member.id, reason=reason, error=why)
                self._events.emit(last)
        else:
            if not isinstance(last, events.MemberFenced):
                last = events.MemberFenced(member=member.id, reason=reason)
                self._events.emit(last)
        self._loop.call_later(self._settings.timeouts.heartbeat, self._fence, member, reason, last)

    def _revoke(self, effect: Revoke) -> None:
        view = self._epoch_guard.view
        error: HoldfastError
        if effect.dead and view is not None and view.epoch == effect.epoch:
            ranks = [rank for death in effect.dead if (rank := view.rank_of(death.id)) is not None]
            error = PeerFailed(ranks, "; ".join(death.evidence for death in effect.dead))
        else:
            error = Revoked(effect.epoch, effect.reason)
        if self._epoch_guard.revoke(effect.epoch, error, effect.reason):
            self.sharing.drop_before(effect.epoch + 1, effect.reason)

    def _install(self, view: View) -> None:
        self._announced_self_to = {}
        if view.phase == "failed":
            name = view.job.name
            self._epoch_guard.end(
                HoldfastError(f"job {name!r} has ended: {view.reason}")
                if view.error is None
                else StepFailed(name, view.reason, view.error)
            )
        self._epoch_guard.install(view)
        self.sharing.begin(view)

    def _announce_to(self, view: View, to: tuple[Member, ...], notice: messages.Notice) -> None:
        """Announce a view; members that learn of it inside their ops get the message a moment later."""
        epoch, announced_to = self._announced
        if epoch == view.epoch:
            later = tuple(m for m in to if m.id in announced_to)
            to = tuple(m for m in to if m.id not in announced_to)
            self._loop.call_later(ANNOUNCED_SECONDS, self._tell, later, notice)
        self._tell(to, notice)

    def _tell(self, to: tuple[Member, ...], notice: messages.Notice) -> None:
        for member in to:
            self.links.deliver(member, *notice)

    def _propose(self, expected: int, view: View) -> None:
        self._reach("rebuild.before_propose")
        self._register_client.propose(expected, view)

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, CasFailed):
            self._events.emit(events.RegisterUnreachable(reason=answer.reason))
            away = self._register_client.away
            if self._epoch_guard.view is None and away >= self._settings.timeouts.rebuild:
                why = f"nobody runs the job, and nothing can be agreed for {away:.3g} s: {answer.reason}"
                self._epoch_guard.end(RegisterAway(self._settings.register, why))
        if isinstance(answer, CasWon):
            self._reach("rebuild.after_propose")
            if self._announce(answer.view):
                self._unreported_win = answer
                self._loop.call_later(WON_SECONDS, self._feed_win)
                return
        self.feed(answer)

    def _feed_win(self) -> None:
        won, self._unreported_win = self._unreported_win, None
        if won is not None:
            self.feed(won)

    def _announce(self, view: View) -> bool:
        """Announce a view that the register has taken to the ranks that wait in ops, if it is running.

        Returns whether the announcement reaches all members of the view.
        """
        before = self._epoch_guard.view
        if before is None or view.phase != "running" or not self._epoch_guard.announce(view):
            return False
        self._announced = (view.epoch, frozenset(before.ranks))
        return view.ranks.keys() <= before.ranks.keys()

    def _reach(self, point: str) -> None:
        if faultpoints.armed():
            view = self._epoch_guard.view
            rank = view.rank_of(self._identity) if view is not None else None
            faultpoints.reach(point, self.step, -1 if rank is None else rank, view.epoch if view is not None else 0)

    # Received messages --------------------------------------------------------------------------------------------

    def _handle_deaths(self, deaths: tuple[Death, ...]) -> None:
        deaths, self._deferred = (*self._deferred, *deaths), ()
        if not deaths:
            return
        detectors = self._detectors
        self._events.emit(
            events.DeathsDetected(
                members=tuple(death.id for death in deaths),
                evidence="; ".join(death.evidence for death in deaths),
                errors=tuple(death.error for death in deaths),
                silent=() if detectors is None else tuple(detectors.silent_for(death.id) for death in deaths),
            )
        )
        self.feed(ProvenDeaths(deaths))

    def failed(self, failure: HoldfastError) -> None:
        """An op of this process's communicator has failed."""
        if self._detectors is not None and self._core is not None and self._core.view is not None:
            self._detectors.failed(self._core.view, failure)

    def _linked(self, member_id: str) -> None:
        if self._detectors is not None:
            self._detectors.linked(member_id)
        self.sharing.linked(member_id)
        if self._is_ready and member_id in self._announced_self_to:
            self._announce_self(self._announced_self_to[member_id])

    def ready(self) -> None:
        """This process can do steps from now on. Idempotent."""
        if not self._is_ready:
            self._is_ready = True
            self._announce_selves()

    def _announce_selves(self) -> None:
        """Tell the members that this process can take a place among them, if it has none."""
        to = list(self._announced_self_to.values())
        if to and not self._told_spare:
            self._told_spare = True
            self._events.emit(events.SpareWaits(epoch=self._spare_since, to=tuple(member.id for member in to)))
        for member in to:
            self._announce_self(member)

    def _announce_self(self, member: Member) -> None:
        assert self._core is not None
        self.links.deliver(member, *messages.spare(self._core.me))

    def _beat(self) -> None:
        """Once a heartbeat: send a sign of life with the epoch, and let the detectors check for silence.

        Processes of one host read each other's signs of life in shared memory. They get a message only now and then
        while the epoch lasts, since it costs each of them more than all else that an idle session does.
        """
        self._heartbeat_timer = self._loop.call_later(self._settings.timeouts.heartbeat, self._beat)
        view = self._core.view if self._core is not None else None
        self._calm = self._calm + 1 if view is self._last_view else 0
        self._last_view = view
        needless: set[str] = set()
        if self._detectors is not None and self._calm > CALM_BEATS and self._calm % CALM_BEATS_A_MESSAGE:
            needless = self._detectors.needless()
        self.links.notify_all(*messages.beat(view), but=needless)
        if self._detectors is not None:
            self._detectors.beat()

    def _tell_core(self, event: Event) -> None:
        """Handle an event from a detector."""
        if not isinstance(event, ProvenDeaths):
            self.feed(event)
            return
        view = self._epoch_guard.view
        if view is not None and any(death.id in view.ranks for death in event.deaths):
            self._epoch_guard.rest()
        self._deferred += event.deaths
        gone = {death.id for death in self._deferred}
        if self._core is not None and another_proposes_first(
            self._core.view, self._core.me, gone | self._core.lost().keys()
        ):
            self._loop.call_later(DEFER_SECONDS, self._handle_deaths, ())
        else:
            self._handle_deaths(())

    def _stop(self, reason: str) -> None:
        """End the epoch here without agreement: this process must do nothing more in it."""
        view = self._epoch_guard.view
        if view is not None and self._epoch_guard.revoke(view.epoch, Revoked(view.epoch, reason), reason):
            self.sharing.drop_before(view.epoch + 1, reason)
            self._epoch_guard.end_ops()

    def _resign(self, reason: str) -> None:
        """End this process's part in the job. The others replace it."""
        self.leave(reason)
        self._epoch_guard.end(StaleEpoch(f"this process has left the job: {reason}"))

    def _refused(self, member_id: str) -> None:
        if self._detectors is not None:
            self._detectors.refused(member_id)

    def _is_lost(self, member_id: str) -> bool:
        return self._core is not None and member_id in self._core.lost()

    def _send_detectors(self, member_id: str | None, body: bytes) -> None:
        if member_id is None:
            self.links.notify_all(*messages.detect(body))
        else:
            self.links.notify(member_id, *messages.detect(body))

    def _hear_beat(self, peer: str, epoch: int) -> None:
        if self._detectors is None:
            return
        self._detectors.heard(peer)
        view = self._core.view if self._core is not None else None
        rank = view.rank_of(peer) if view is not None else None
        if view is not None and rank is not None and epoch not in (0, view.epoch):
            self.feed(EpochHeard(view.members[rank], epoch))

    def _hear_suspicion(self, peer: str, member: str, evidence: str | None) -> None:
        if self._detectors is not None:
            self._detectors.reported(peer, member, evidence)

    def _hear_detectors(self, peer: str, body: bytes) -> None:
        if self._detectors is not None:
            self._detectors.received(peer, body)
