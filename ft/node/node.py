"""The membership of one process: runs the membership state machine on the ports of its world.

Its events come from detectors, the other members, the register and timers. It carries out the effects: revoke and
install epochs in the session's `EpochGuard`, compare-and-set the register, notify the others. It has no thread, socket
or clock of its own, so the same class runs in an event loop (`Runtime`) and in the virtual time of the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set

from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, Mismatch, PeerFailed, Revoked, StaleEpoch, valid_text
from holdfast.comms.plugins.spec import DetectorInfo
from holdfast.ft import events
from holdfast.ft.detectors.detector import DetectorContext
from holdfast.ft.detectors.process_watch import death_of
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.membership.dissemination import another_proposes_first
from holdfast.ft.membership.events import (
    LEFT,
    Announce,
    AnnounceSelf,
    CasFailed,
    CasWon,
    Cleared,
    Death,
    Effect,
    EpochHeard,
    Event,
    Evicted,
    Fence,
    Install,
    Propose,
    ProvenDeaths,
    ReadRegister,
    Refused,
    Report,
    Revoke,
    SpareAnnounced,
    Started,
    Suspicion,
    Tick,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.state_machine import Membership
from holdfast.ft.membership.view import Member, StepFailed, View
from holdfast.ft.node import messages
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.register import RegisterClient
from holdfast.ft.node.table_sharing import TableSharing, neighbours
from holdfast.ft.ports import Answer, Ports, Timer
from holdfast.ft.registers import RegisterAway

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

MOST_REASON = 2000
"""Characters of the reason for which a process leaves: views and events repeat it."""

_log = logging.getLogger("holdfast.ft")


class Node:
    """The membership of one process. All methods but the thread-safe ones are called in one thread, its own.

    `was_spare` is True once this process has been outside of a running view: there it tells the members of itself once
    it is `ready`, or they would wait for it while it still prepares its steps. `has_left` is True once it has told the
    others that it leaves.
    """

    def __init__(
        self,
        core: Membership,
        guard: EpochGuard,
        ports: Ports,
        emit: Callable[[events.Event], None],
        detectors: Iterable[DetectorInfo],
        reach: Callable[[str, Callable[[], None]], None],
        register: str = "",
    ) -> None:
        """`core` is the state before any event, and `register` the URL of the register, for errors.

        `reach(point, go_on)` calls `go_on()`, unless a fault is injected at this point of the protocol.
        """
        self.core = core
        self.was_spare = self.has_left = False
        self._identity, self._guard, self._emit = core.me.id, guard, emit
        self._time, self._links, self._processes = ports.time, ports.links, ports.processes
        self._infos, self._reach, self._register = detectors, reach, register
        self._timeouts = core.timeouts
        self.sharing = TableSharing(self._identity, ports.time, ports.links)
        self._register_client = RegisterClient(ports.register, ports.time, core.timeouts, self.feed, self._answered)
        self._detectors: Detectors | None = None
        """None until `watch`."""
        self._closed = False
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        """The time `wake_at` of the core for which the timer is set."""
        self._heartbeat_timer: Timer | None = None
        self._last_view: View | None = None
        self._calm = 0
        """The heartbeats since the view has changed."""
        self._depth = 0
        """How many calls of `feed` are open: an effect may feed the next event."""
        self._following = False
        """Whether an update of the watched processes is due."""
        self._followed_epoch = 0
        """The epoch of the view that the detectors evaluate: for a moment it is that before the newest."""
        self._announced_self_to: dict[str, Member] = {}
        self._spare_since = 0
        self._is_ready = self._told_spare = False
        """Whether this process can do steps, and whether its event as a spare is written."""
        self._unreported: dict[tuple[str, ...], tuple[tuple[Member, ...], list[Suspicion | Cleared]]] = {}
        """Findings to report at the end of this turn of the loop, by the ids of those that get them."""
        self._deferred: tuple[Death, ...] = ()
        """Deaths that another member of this host acts on first (`DEFER_SECONDS`)."""
        self._announced: tuple[int, frozenset[str]] = (0, frozenset())
        """The epoch that was announced inside of ops, and to which members: they get its message later."""
        self._unreported_win: CasWon | None = None
        """The register's answer that this process's core learns a moment later (`WON_SECONDS`)."""

    def begin(self, view: View | None) -> None:
        """Take part in the job; `view` is what the register holds."""
        self._emit(events.JoinRequested(address=self.core.me.address))
        self.feed(ViewRead(view))
        self.feed(Started())

    def watch(self) -> None:
        """Make the detectors, and from now on send heartbeats, watch the other processes and follow the register.

        Before, a node only hears what others tell it. The simulator leaves it at that where nothing happens.
        """
        self._detectors = Detectors(
            DetectorContext(
                me=self.core.me,
                timeouts=self._timeouts,
                loop=self._time,
                tell=self._tell_core,
                stop=self._stop,
                resign=self._resign,
                note=self._emit,
                place=self._guard.place,
                lost=self._is_lost,
                processes=self._processes,
            ),
            list(self._infos),
            self._send_detectors,
        )
        self._follow_soon(self.core)
        self._beat()
        self._register_client.follow()

    # Called by the session, from its thread ----------------------------------------------------------------------

    @property
    def missed_heartbeats(self) -> int:
        """The number of heartbeats of others that did not arrive, so far. Thread-safe."""
        return 0 if self._detectors is None else self._detectors.missed

    def another_continues(self, among: Set[str]) -> bool:
        """Whether one of the other members in `among` was seen to have entered more ops of the epoch. Thread-safe.

        Only processes of this host are seen.
        """
        place = self._guard.place()
        places = {} if self._detectors is None else dict(self._detectors.places)
        return any(
            there.epoch == place.epoch and there.entered > place.entered
            for member, there in places.items()
            if member in among
        )

    # The state machine --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close detectors and timers. No event is handled afterwards."""
        self._closed = True
        self._register_client.end()
        for timer in (self._timer, self._heartbeat_timer):
            if timer is not None:
                timer.cancel()
        if self._detectors is not None:
            self._detectors.close()
            self._detectors = None
        self.sharing.flush()

    def leave(self, reason: str, error: str = "") -> None:
        """Tell the others that this process has left the job, as if it had died; `error` as in `Death`."""
        self.has_left = True
        farewell = messages.Farewell(valid_text(reason, MOST_REASON), valid_text(error, MOST_REASON))
        self._links.notify_all(*messages.notice(farewell))

    def feed(self, event: Event) -> None:
        """Pass one event to the state machine and carry out its effects."""
        self._feed_win()  # the answer that waits comes first, or the core would decide without it
        if self._closed:
            return
        before = self.core
        self.core, effects = before.on(event, self._time.time())
        self._depth += 1
        try:
            for effect in effects:
                self._perform(effect)
        except Exception as error:  # the core believes that the effect has happened: the process cannot go on
            _log.exception("an effect of %r failed", event)
            self._guard.end(HoldfastError(f"this process cannot go on in its job: {type(error).__name__}: {error}"))
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:  # notify the others before this process's own threads wake up
                self._guard.end_ops()
        if self.core.spares is not before.spares:
            for spare in self.core.spares:
                if spare not in before.spares:
                    self._emit(events.SpareWelcomed(spare=spare.id))
        if self.core.view is not before.view or self.core.spares is not before.spares:
            self._follow_soon(before)
        self._set_timer(self.core.wake_at)

    def _follow_soon(self, before: Membership) -> None:
        """Update the watched processes a moment later, after urgent work."""
        if not self._following and self._detectors is not None:
            known = {member.id for member in before.watched()} | {self._identity}
            view = self.core.view
            is_known = view is not None and self.core.shape.is_mesh(view)
            is_known = is_known and all(member.id in known for member in self.core.watched())
            self._following = True
            self._time.call_later(FOLLOW_FEWER_SECONDS if is_known else FOLLOW_SECONDS, self._follow)

    def _follow(self) -> None:
        self._following = False
        if self._detectors is None:
            return
        watched, view = self.core.watched(), self.core.view
        self._followed_epoch = 0 if view is None else view.epoch
        self._detectors.follow(view, watched)
        linked = {m.id: m for m in watched}
        ranks = view.ranks if view is not None else {}
        mine = ranks.get(self._identity)
        if view is not None and mine is not None:  # the rendezvous table is passed on along these
            linked.update({m.id: m for m in neighbours(view, mine)})
        first = len(ranks) if mine is None else mine  # a newcomer dials the members, a member those before it
        self._links.follow(
            [m for m in linked.values() if ranks.get(m.id, len(ranks)) < first],
            [m for m in linked.values() if ranks.get(m.id, len(ranks)) >= first],
        )

    def _set_timer(self, at: float | None) -> None:
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            self._timer = self._time.call_later(max(0.0, at - self._time.time()), self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, None
        self.feed(Tick())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Revoke():
                self._revoke(effect)
            case Propose(expected, view):
                self._emit(events.ViewProposed(epoch=view.epoch, phase=view.phase, reason=view.reason))
                self._reach("rebuild.before_propose", lambda: self._register_client.propose(expected, view))
            case Announce(view, to, None):
                self._announce_to(view, to, messages.notice(ViewRead(view)))
            case Announce(view, to, change):
                assert change is not None
                self._announce_to(view, to, messages.notice(ViewDeltaReceived(change)))
            case ReadRegister():
                self._register_client.read()
            case Report(ProvenDeaths() as deaths, to):
                self._tell(to, messages.notice(deaths))
            case Report(Suspicion() | Cleared() as finding, to):
                self._report_soon(finding, to)
            case AnnounceSelf(view, to):
                self.was_spare = True
                self._announced_self_to = {member.id: member for member in to}
                self._spare_since = view.epoch
                if self._is_ready:
                    self._announce_selves()
            case Install(view):
                self._install(view)
            case Evicted() if self.has_left:
                pass  # the others' next view is there before this process has closed: it says what was asked for
            case Evicted(view, reason):
                self._emit(events.WasEvicted(epoch=view.epoch, reason=reason))
                self._guard.end(StaleEpoch(f"evicted in epoch {view.epoch}: {reason}"))
            case Refused(reason):
                self._guard.end(Mismatch(f"cannot join job {self.core.job.name!r}: {reason}"))
            case Fence(member, reason):
                self._fence(member, reason)

    def _fence(self, member: Member, reason: str, last: events.Event | None = None) -> None:
        """End a process of this host; again once a heartbeat, until its end is proved.

        `last` is the last event on it: an event is written when it changes from success to failure or back.
        """
        if self._detectors is None:
            return
        if self._processes.is_gone(member.peer):
            if any(m.id == member.id for m in self.core.watched()) and not self._is_lost(member.id):
                self._handle_deaths((death_of(member),))
            return
        try:
            self._processes.kill(member.peer)
        except OSError as error:
            if not isinstance(last, events.FenceFailed):
                why = f"SIGKILL to pid {member.peer.pid}: {error.strerror or error}"
                last = events.FenceFailed(member=member.id, reason=reason, error=why)
                self._emit(last)
        else:
            if not isinstance(last, events.MemberFenced):
                last = events.MemberFenced(member=member.id, reason=reason)
                self._emit(last)
        self._time.call_later(self._timeouts.heartbeat, self._fence, member, reason, last)

    def _revoke(self, effect: Revoke) -> None:
        view = self._guard.view
        error: HoldfastError
        if effect.dead and view is not None and view.epoch == effect.epoch:
            error = view.remember("peers failed", effect.dead, lambda: _peers_failed(view, effect.dead)).again()
        else:
            error = Revoked(effect.epoch, effect.reason)
        if self._guard.revoke(effect.epoch, error, effect.reason):
            self.sharing.drop_before(effect.epoch + 1, effect.reason)

    def _install(self, view: View) -> None:
        self._announced_self_to = {}
        if view.phase == "failed":
            name = view.job.name
            self._guard.end(
                HoldfastError(f"job {name!r} has ended: {view.reason}")
                if view.error is None
                else StepFailed(name, view.reason, view.error)
            )
        self._guard.install(view)
        self.sharing.begin(view)

    def _announce_to(self, view: View, to: tuple[Member, ...], notice: messages.Notice) -> None:
        """Announce a view; members that learn of it inside their ops get the message a moment later."""
        epoch, announced_to = self._announced
        if epoch == view.epoch:
            later = tuple(m for m in to if m.id in announced_to)
            to = tuple(m for m in to if m.id not in announced_to)
            self._time.call_later(ANNOUNCED_SECONDS, self._tell, later, notice)
        self._tell(to, notice)

    def _tell(self, to: tuple[Member, ...], notice: messages.Notice) -> None:
        for member in to:
            self._links.deliver(member, *notice)

    def _report_soon(self, finding: Suspicion | Cleared, to: tuple[Member, ...]) -> None:
        """Report all findings of a turn of the loop together: a lost host has many members."""
        if not self._unreported:
            self._time.call_later(0.0, self._report)
        self._unreported.setdefault(tuple(member.id for member in to), (to, []))[1].append(finding)

    def _report(self) -> None:
        unreported, self._unreported = self._unreported, {}
        if self._closed:
            return
        for to, findings in unreported.values():
            suspicions = tuple(each for each in findings if isinstance(each, Suspicion))
            cleared = tuple(each for each in findings if isinstance(each, Cleared))
            self._tell(to, messages.notice(messages.Suspicions(suspicions, cleared)))

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, CasFailed):
            self._emit(events.RegisterUnreachable(reason=answer.reason))
            away = self._register_client.away
            if self._guard.view is None and away >= self._timeouts.rebuild:
                why = f"nobody runs the job, and nothing can be agreed for {away:.3g} s: {answer.reason}"
                self._guard.end(RegisterAway(self._register, why))
        if isinstance(answer, CasWon):
            self._reach("rebuild.after_propose", lambda: self._won(answer))
        else:
            self.feed(answer)

    def _won(self, answer: CasWon) -> None:
        if self._announce(answer.view):
            self._unreported_win = answer
            self._time.call_later(WON_SECONDS, self._feed_win)
        else:
            self.feed(answer)

    def _feed_win(self) -> None:
        won, self._unreported_win = self._unreported_win, None
        if won is not None:
            self.feed(won)

    def _announce(self, view: View) -> bool:
        """Announce a view that the register has taken to the ranks that wait in ops, if it is running.

        Returns whether the announcement reaches all members of the view.
        """
        before = self._guard.view
        if before is None or view.phase != "running" or not self._guard.announce(view):
            return False
        self._announced = (view.epoch, frozenset(before.ranks))
        return view.ranks.keys() <= before.ranks.keys()

    # Received messages --------------------------------------------------------------------------------------------

    def hear(self, peer: str, message: messages.Message) -> None:
        """Handle a message of another process. Raises `CorruptData` for an invalid one of a detector."""
        match message:
            case messages.Beat(epoch):
                self._hear_beat(peer, epoch)
            case ViewRead(view):
                self.feed(ViewRead(view, peer))
            case ViewDeltaReceived(change):
                self.feed(ViewDeltaReceived(change, peer))
            case SpareAnnounced():
                self.feed(message)
            case ProvenDeaths(deaths):
                self._handle_deaths(deaths)
            case messages.Farewell(reason, error):
                self._handle_deaths((Death(peer, LEFT + reason, error),))
            case messages.Share(epoch, items):
                self.sharing.received(peer, epoch, items)
            case messages.Suspicions(suspicions, cleared):
                for suspicion in suspicions:
                    self._hear_suspicion(peer, suspicion.member, suspicion.evidence)
                    self.feed(replace(suspicion, observer=peer))
                for clearance in cleared:
                    self._hear_suspicion(peer, clearance.member, None)
                    self.feed(replace(clearance, observer=peer))
            case messages.DetectorMessage(body):
                if self._detectors is not None:
                    self._detectors.received(peer, body)

    def _handle_deaths(self, deaths: tuple[Death, ...]) -> None:
        deaths, self._deferred = (*self._deferred, *deaths), ()
        if not deaths:
            return
        detectors = self._detectors
        self._emit(
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
        if self._detectors is not None and self.core.view is not None:
            self._detectors.failed(self.core.view, failure)

    def linked(self, member_id: str) -> None:
        """A connection to another process was made."""
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
            self._emit(events.SpareWaits(epoch=self._spare_since, to=tuple(member.id for member in to)))
        for member in to:
            self._announce_self(member)

    def _announce_self(self, member: Member) -> None:
        self._links.deliver(member, *messages.notice(SpareAnnounced(self.core.me)))

    def _beat(self) -> None:
        """Once a heartbeat: send a sign of life with the epoch, and let the detectors check for silence.

        Processes of one host read each other's signs of life in shared memory. They get a message only now and then
        while the epoch lasts, since it costs each of them more than all else that an idle session does.
        """
        self._heartbeat_timer = self._time.call_later(self._timeouts.heartbeat, self._beat)
        view = self.core.view
        self._calm = self._calm + 1 if view is self._last_view else 0
        self._last_view = view
        needless: set[str] = set()
        if self._detectors is not None and self._calm > CALM_BEATS and self._calm % CALM_BEATS_A_MESSAGE:
            needless = self._detectors.needless()
        beat = messages.Beat(0 if view is None else view.epoch)
        self._links.notify_all(*messages.notice(beat), but=needless)
        if self._detectors is not None:
            self._detectors.beat()

    def _tell_core(self, event: Event) -> None:
        """Handle an event from a detector."""
        if not isinstance(event, ProvenDeaths):
            self.feed(event)
            return
        view = self._guard.view
        if view is not None and any(death.id in view.ranks for death in event.deaths):
            self._guard.rest()
        self._deferred += event.deaths
        gone = {death.id for death in self._deferred}
        if another_proposes_first(self.core.view, self.core.me, gone | self.core.evidence.lost.keys()):
            self._time.call_later(DEFER_SECONDS, self._handle_deaths, ())
        else:
            self._handle_deaths(())

    def _stop(self, reason: str) -> None:
        """End the epoch here without agreement: this process must do nothing more in it."""
        view = self._guard.view
        if (
            view is not None
            and not self._judges_another(view)
            and self._guard.revoke(view.epoch, Revoked(view.epoch, reason), reason)
        ):
            self.sharing.drop_before(view.epoch + 1, reason)
            self._guard.end_ops()

    def _judges_another(self, view: View) -> bool:
        """Whether the detectors still evaluate the members of an earlier view: that is no evidence against this one."""
        return view.epoch != self._followed_epoch

    def _resign(self, reason: str) -> None:
        """End this process's part in the job. The others replace it."""
        view = self._guard.view
        if view is not None and self._judges_another(view):  # the others have gone on with it: it need not leave
            return
        self.leave(reason)
        self._guard.end(StaleEpoch(f"this process has left the job: {reason}"))

    def refused(self, member_id: str) -> None:
        """The host of another process refuses connections to its address."""
        if self._detectors is not None:
            self._detectors.refused(member_id)

    def _is_lost(self, member_id: str) -> bool:
        return member_id in self.core.evidence.lost

    def _send_detectors(self, member_id: str | None, body: bytes) -> None:
        notice = messages.notice(messages.DetectorMessage(body))
        if member_id is None:
            self._links.notify_all(*notice)
        else:
            self._links.notify(member_id, *notice)

    def _hear_beat(self, peer: str, epoch: int) -> None:
        if self._detectors is None:
            return
        self._detectors.heard(peer)
        view = self.core.view
        rank = view.rank_of(peer) if view is not None else None
        if view is not None and rank is not None and epoch not in (0, view.epoch):
            self.feed(EpochHeard(view.members[rank], epoch))

    def _hear_suspicion(self, peer: str, member: str, evidence: str | None) -> None:
        if self._detectors is not None:
            self._detectors.reported(peer, member, evidence)


def _peers_failed(view: View, dead: tuple[Death, ...]) -> PeerFailed:
    """The error of ops of `view` that ends because of these deaths."""
    ranks = [rank for death in dead if (rank := view.rank_of(death.id)) is not None]
    return PeerFailed(ranks, "; ".join(death.evidence for death in dead))
