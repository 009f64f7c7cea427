"""The membership core in an event loop: what is heard goes into it, what it asks for is done.

What it hears: processes that end (pidfds), silence, the other members, the register, time. What it does: revoke and
install in the `Tenure` that the session works by, compare-and-set the register, tell the others. The register is only
ever asked from a thread of its own, so one that is away delays a rebuild and holds up nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

import msgspec

from holdfast.comms.errors import CorruptData, HoldfastError, Mismatch, PeerFailed, Revoked, StaleEpoch
from holdfast.comms.liveness import this_process
from holdfast.ft import faultpoints
from holdfast.ft import vocabulary as v
from holdfast.ft.control import kv
from holdfast.ft.control.rpc import Handler
from holdfast.ft.events import EventLog
from holdfast.ft.joining import Settings, one_host_backends
from holdfast.ft.links import Links
from holdfast.ft.meeting import SharedTable
from holdfast.ft.membership import Membership
from holdfast.ft.processes import ProcessWatch, is_stopped
from holdfast.ft.register import Register
from holdfast.ft.registers import RegisterAway
from holdfast.ft.silence import Silence
from holdfast.ft.tenure import Tenure
from holdfast.ft.view import Job, Member, View

LOOKS_A_HEARTBEAT = 4
"""How often those who are silent are looked at."""
FOLLOW_SECONDS = 0.002

_log = logging.getLogger("holdfast.ft")
_encode = msgspec.msgpack.Encoder().encode
_member = msgspec.msgpack.Decoder(Member)
_deaths = msgspec.msgpack.Decoder(list[tuple[str, str]])
_words = msgspec.msgpack.Decoder(tuple[str, str])
_text = msgspec.msgpack.Decoder(str)
_items = msgspec.msgpack.Decoder(tuple[int, dict[str, bytes]])


class Reactor:
    """One process's membership. Made and used in one event loop.

    `step` is what fault points are told. `was_spare` is True once this process has waited outside of a running view.
    """

    def __init__(
        self,
        identity: str,
        settings: Settings,
        tenure: Tenure,
        events: EventLog,
        register: Register,
        pool: Executor,
    ) -> None:
        self.step = -1
        self.was_spare = False
        self.table = SharedTable(self._share_soon)
        self._identity, self._settings, self._tenure, self._events = identity, settings, tenure, events
        self._register, self._pool = register, pool
        self._loop = asyncio.get_running_loop()
        self.links = Links(
            identity,
            key=settings.key,
            job=settings.name,
            handlers={**kv.handlers(self.table), **self._handlers()},
            on_link=self._linked,
        )
        self._processes = ProcessWatch(self._buried)
        self._core: Membership | None = None
        self._silence: Silence | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._question = 0
        self._depth = 0
        self._following = self._looking = False
        self._spare_for: View | None = None

    async def begin(self, host: str, job: Job, view: View | None, threads: tuple[int, ...]) -> None:
        """Listen on `host` and take part in `job`, of which the register shows `view`.

        `threads` are the kernel's numbers of threads of this process that end no sooner than this reactor.
        """
        address = await self.links.start(host)
        me = Member(self._identity, address, this_process(), threads)
        self._silence = Silence(me, self._settings.timeouts, is_stopped)
        self._core = Membership(me, job, self._settings.timeouts, one_host_backends(job.backends))
        self._events.emit("joined", address=address)
        self.feed(v.ViewRead(view))
        self.feed(v.Started())
        self._beat()

    async def end(self) -> None:
        """Let go of everything. Nothing is heard from here on."""
        self._core = None
        for timer in (self._timer, self._pulse, self._deadline):
            if timer is not None:
                timer.cancel()
        self._processes.close()
        await self.links.close()

    def leave(self, reason: str) -> None:
        """Tell the others that this process is gone for the job, as if it had died."""
        self.links.notify_all("leave", _encode(reason))

    def feed(self, event: v.Event) -> None:
        """One event through the core, its effects into the world."""
        before = self._core
        if before is None:
            return
        self._core, effects = before.on(event, time.monotonic())
        self._depth += 1
        try:
            for effect in effects:
                self._perform(effect)
        except Exception as error:
            _log.exception("an effect of %r failed", event)
            self._tenure.end(HoldfastError(f"this process cannot go on in its job: {type(error).__name__}: {error}"))
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:  # what others wait for comes before what wakes up this process's own threads
                self._tenure.end_ops()
        if self._core.view is not before.view or self._core.spares is not before.spares:
            self._follow_soon()
        self._set_timer(self._core.wake_at)

    def _follow_soon(self) -> None:
        """Whom to watch may have changed: look a moment later, when what is urgent is done."""
        if not self._following:
            self._following = True
            self._loop.call_later(FOLLOW_SECONDS, self._follow)

    def _follow(self) -> None:
        self._following = False
        core = self._core
        if core is None or self._silence is None:
            return
        watched = core.watched()
        self._processes.follow(watched)
        self._silence.follow(watched, time.monotonic())
        view, mine = core.view, None
        if view is not None:
            mine = view.rank_of(self._identity)
        earlier = {m.id for m in view.members[:mine]} if view is not None else set[str]()
        self.links.follow(
            [m for m in watched if m.id in earlier],
            [m for m in watched if m.id not in earlier],
        )

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay = max(0.0, at - time.monotonic())
            self._timer = self._loop.call_later(delay, self.feed, v.Tick())

    def _perform(self, effect: v.Effect) -> None:
        match effect:
            case v.Revoke():
                self._revoke(effect)
            case v.Propose(expected, view):
                self._events.emit("proposed", epoch=view.epoch, phase=view.phase, reason=view.reason)
                self._propose(expected, view)
            case v.Announce(view):
                self._announce(view)
            case v.Report(deaths, to):
                body = _encode([(death.id, death.evidence) for death in deaths])
                for member in to:
                    self.links.notify(member.id, "deaths", body)
            case v.AnnounceSelf(view):
                if not self.was_spare:
                    self.was_spare = True
                    self._events.emit("spare", epoch=view.epoch)
                self._spare_for = view
                for member in view.members:
                    self._introduce(member.id)
            case v.Install(view):
                self._install(view)
            case v.Evicted(view, reason):
                self._events.emit("evicted", epoch=view.epoch, reason=reason)
                self._tenure.end(StaleEpoch(f"evicted in epoch {view.epoch}: {reason}"))
            case v.Refused(reason):
                self._tenure.end(Mismatch(f"cannot join job {self._settings.name!r}: {reason}"))
            case v.Fence(member, reason):
                self._events.emit("fenced", member=member.id, reason=reason)
                self._processes.fence(member)

    def _revoke(self, effect: v.Revoke) -> None:
        view = self._tenure.view
        error: HoldfastError
        if effect.dead and view is not None and view.epoch == effect.epoch:
            ranks = [rank for death in effect.dead if (rank := view.rank_of(death.id)) is not None]
            error = PeerFailed(ranks, "; ".join(death.evidence for death in effect.dead))
        else:
            error = Revoked(effect.epoch, effect.reason)
        if self._tenure.revoke(effect.epoch, error):
            self.table.drop_before(effect.epoch + 1, effect.reason)
            self._events.emit("revoked", epoch=effect.epoch, reason=effect.reason)

    def _install(self, view: View) -> None:
        self._spare_for = None
        self.table.drop_before(view.epoch)
        members = [member.id for member in view.members]
        if view.phase == "running":
            rank = view.rank_of(self._identity)
            self._events.emit("installed", epoch=view.epoch, members=members, rank=rank, reason=view.reason)
        if view.phase == "failed":
            self._tenure.end(HoldfastError(f"job {view.job.name!r} has ended: {view.reason}"))
        self._tenure.install(view)

    def _announce(self, view: View) -> None:
        assert self._core is not None
        body = view.encode()
        for member in (*view.members, *self._core.spares):
            if member.id != self._identity:
                self.links.notify(member.id, "install", body)

    def _propose(self, expected: int, view: View) -> None:
        """Ask the register: here if it is local, else in a thread, where what comes too late counts as not answered."""
        self._reach("rebuild.before_propose")
        if self._register.local:
            self._answered(self._question, self._compare_and_set(expected, view))
            return
        self._question += 1
        number, patience = self._question, self._settings.timeouts.rebuild
        late = v.CasFailed(f"the register did not answer within {patience:g} s")
        self._deadline = self._loop.call_later(patience, self._answered, number, late)
        self._pool.submit(self._ask, number, expected, view)

    def _ask(self, number: int, expected: int, view: View) -> None:
        event = self._compare_and_set(expected, view)
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
            self._loop.call_soon_threadsafe(self._answered, number, event)

    def _answered(self, number: int, event: v.CasWon | v.CasLost | v.CasFailed) -> None:
        if number != self._question or self._core is None:
            return
        self._question += 1
        if self._deadline is not None:
            self._deadline.cancel()
        if isinstance(event, v.CasFailed):
            self._events.emit("register_away", reason=event.reason)
        if isinstance(event, v.CasWon):
            self._reach("rebuild.after_propose")
        self.feed(event)

    def _compare_and_set(self, expected: int, view: View) -> v.CasWon | v.CasLost | v.CasFailed:
        try:
            if self._register.compare_and_set(expected, view):
                return v.CasWon(view)
            return v.CasLost(self._register.read())
        except (RegisterAway, CorruptData) as error:
            return v.CasFailed(str(error))

    def _reach(self, point: str) -> None:
        view = self._tenure.view
        rank = view.rank_of(self._identity) if view is not None else None
        faultpoints.reach(point, self.step, -1 if rank is None else rank, view.epoch if view is not None else 0)

    def _share_soon(self, epoch: int, items: Mapping[str, bytes]) -> None:
        """From any thread: push to the others of the view what was set in the table, if this process is its first."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process has left
            self._loop.call_soon_threadsafe(self._share, epoch, items)

    def _share(self, epoch: int, items: Mapping[str, bytes], only: str | None = None) -> None:
        view = self._core.view if self._core is not None else None
        if view is None or view.epoch != epoch or not view.members or view.members[0].id != self._identity:
            return
        body = _encode((epoch, items))
        for member in view.members[1:]:
            if only in (None, member.id):
                self.links.notify(member.id, "share", body)

    # What is heard --------------------------------------------------------------------------------------------

    def _buried(self, deaths: tuple[v.Death, ...]) -> None:
        self._events.emit(
            "detected", members=[death.id for death in deaths], evidence="; ".join(death.evidence for death in deaths)
        )
        self.feed(v.Proof(deaths))

    def _linked(self, member_id: str) -> None:
        view = self._tenure.view
        if view is not None and view.phase == "running" and not self._tenure.is_over(view.epoch):
            items = self.table.items(view.epoch)
            if items:
                self._share(view.epoch, items, only=member_id)
        if self._spare_for is not None and self._spare_for.rank_of(member_id) is not None:
            self._introduce(member_id)

    def _introduce(self, member_id: str) -> None:
        assert self._core is not None
        self.links.notify(member_id, "spare", _encode(self._core.me))

    def _beat(self) -> None:
        """Once a heartbeat: say that this process lives, and look whether somebody is silent."""
        self.links.notify_all("beat", b"")
        self._look()
        self._pulse = self._loop.call_later(self._settings.timeouts.heartbeat, self._beat)

    def _look(self) -> None:
        """Look at the silent, and again soon if there are any."""
        if self._silence is None or self._core is None:
            return
        for verdict in self._silence.look(time.monotonic()):
            self._suspected(verdict)
        if self._silence.somebody_is_silent and not self._looking:
            self._looking = True
            self._loop.call_later(self._settings.timeouts.heartbeat / LOOKS_A_HEARTBEAT, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self._look()

    def _suspected(self, verdict: v.Stalled | v.Suspicion | v.Cleared) -> None:
        match verdict:
            case v.Suspicion(member, _, evidence):
                self._events.emit("suspected", member=member, evidence=evidence)
                self.links.notify_all("suspect", _encode((member, evidence)))
            case v.Cleared(member, _):
                self.links.notify_all("clear", _encode(member))
            case v.Stalled():
                pass
        self.feed(verdict)

    def _handlers(self) -> dict[str, Handler]:
        """What other processes of the job may tell this one; they have proved that they have its key."""

        def heard(act: Callable[[str, bytes], None]) -> Callable[[str, bytes], bytes]:
            def handler(peer: str, body: bytes) -> bytes:
                try:
                    act(peer, body)
                except msgspec.DecodeError as error:
                    raise CorruptData(f"a notice of {peer} cannot be read: {error}") from error
                return b""

            return handler

        return {
            "beat": heard(self._hear_beat),
            "install": heard(lambda peer, body: self.feed(v.ViewRead(View.decode(body)))),
            "spare": heard(lambda peer, body: self.feed(v.SpareAnnounced(_member.decode(body)))),
            "deaths": heard(lambda peer, body: self._buried(tuple(v.Death(*death) for death in _deaths.decode(body)))),
            "leave": heard(lambda peer, body: self._buried((v.Death(peer, f"it left: {_text.decode(body)}"),))),
            "share": heard(lambda peer, body: self._hear_share(*_items.decode(body))),
            "suspect": heard(self._hear_suspicion),
            "clear": heard(lambda peer, body: self.feed(v.Cleared(_text.decode(body), peer))),
        }

    def _hear_beat(self, peer: str, body: bytes) -> None:
        if self._silence is None:
            return
        for verdict in self._silence.hear(peer, time.monotonic()):
            self._suspected(verdict)

    def _hear_share(self, epoch: int, items: dict[str, bytes]) -> None:
        with contextlib.suppress(Revoked):  # it is about an epoch that is over here
            self.table.receive(epoch, items)

    def _hear_suspicion(self, peer: str, body: bytes) -> None:
        member, evidence = _words.decode(body)
        self.feed(v.Suspicion(member, peer, evidence))
