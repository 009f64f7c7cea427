"""Who is in the job: every decision about it, as a pure state machine.

`Membership.on(event, now)` gives the next state and what is to be done about it. There is no clock, network,
thread or chance in here, so the same class runs under the real runtime, a simulator and an exhaustive
explorer.

How it decides. The register holds one view an epoch, replaced only by compare-and-set, so two views of one
epoch cannot exist. Whoever sees that the view should change works out the next one; the lowest alive member
proposes it at once, each further member one heartbeat later if nothing has come of it. After every event the
whole situation is looked at again, so a lost message, a lost race or another death on the way needs no case
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from holdfast.ft.composition import formed, runnable, successors
from holdfast.ft.timeouts import Timeouts
from holdfast.ft.view import Job, Member, Phase, View
from holdfast.ft.vocabulary import (
    Announce,
    AnnounceSelf,
    CasFailed,
    CasLost,
    CasWon,
    Cleared,
    Death,
    Effect,
    Event,
    Evicted,
    Fence,
    Install,
    LocalFinished,
    Proof,
    Propose,
    Refused,
    Report,
    Revoke,
    SpareAnnounced,
    SpareGone,
    Stalled,
    Started,
    Suspicion,
    Tick,
    ViewRead,
)

Ended = Literal["", "finished", "failed", "evicted", "refused"]
Step = tuple["Membership", tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class Need:
    """A view that should come to be: not before `after`, and then `turn` seconds later on this process."""

    view: View
    turn: float
    after: float = 0.0

    def key(self) -> tuple[str, ...]:
        return (self.view.phase, *(member.id for member in self.view.members))


class Membership(Struct, frozen=True):
    """What one process knows of the job, and what it makes of it. Immutable.

    `me` is this process. `job` is the job as this process would found it: `job.backends` are those that it
    can run, in its order of preference; `one_host` those of them that need all members on one host. `view` is
    the newest view known, `gone` the dead, `spares` the processes that wait outside, in the order they
    announced themselves. `ended` is set once nothing more can happen. `wake_at` is the time at which a `Tick`
    is wanted; None if none is.
    """

    me: Member
    job: Job
    timeouts: Timeouts
    one_host: frozenset[str] = frozenset()
    view: View | None = None
    ended: Ended = ""
    gone: tuple[Death, ...] = ()
    spares: tuple[Member, ...] = ()
    suspicions: frozenset[Suspicion] = frozenset()
    fenced: frozenset[str] = frozenset()
    finished: bool = False
    started_at: float | None = None
    in_flight: View | None = None
    wanted: tuple[str, ...] = ()
    wanted_since: float = 0.0
    short_since: float | None = None
    retry_at: float = 0.0
    wake_at: float | None = None

    def on(self, event: Event, now: float) -> Step:
        """The state after `event` at time `now` (seconds, never going back), and what is to be done."""
        if self.ended:
            return self, ()
        state, effects = self._absorb(event, now)
        if state.ended:
            return replace(state, wake_at=None), effects
        revoked = state._newly_lost(self)
        decided, more = state._decide(now)
        return decided, effects + revoked + more

    def rank(self) -> int | None:
        """This process's rank in a running view; None outside of one."""
        if self.view is None or self.view.phase != "running":
            return None
        return self.view.rank_of(self.me.id)

    def watched(self) -> tuple[Member, ...]:
        """The processes whose death matters to this one."""
        members = self.view.members if self.view is not None and not self.ended else ()
        return tuple(m for m in (*members, *self.spares) if m.id != self.me.id)

    def lost(self) -> dict[str, str]:
        """The dead and those condemned by most of their observers: id -> evidence."""
        lost = {death.id: death.evidence for death in self.gone}
        if self.view is not None and self.suspicions:
            for suspect in {s.member for s in self.suspicions} - lost.keys() - {self.me.id}:
                jury = {m.id for m in self.view.members} - lost.keys() - {suspect}
                against = [s for s in self.suspicions if s.member == suspect and s.observer in jury]
                if 2 * len(against) > len(jury):
                    evidence = min(against, key=lambda s: s.observer).evidence
                    lost[suspect] = f"suspected by {len(against)} of {len(jury)} observers: {evidence}"
        return lost

    # What an event changes ----------------------------------------------------------------------------------

    def _absorb(self, event: Event, now: float) -> Step:
        match event:
            case Started():
                return replace(self, started_at=now), ()
            case ViewRead(view):
                return self._adopt(view)
            case CasWon(view):
                state, effects = replace(self, in_flight=None)._adopt(view)
                return state, (*effects, Announce(view))
            case CasLost(view):
                lost = replace(self, in_flight=None)
                if view is None or (self.view is not None and view.epoch <= self.view.epoch):
                    return replace(lost, retry_at=now + self.timeouts.heartbeat), ()
                return lost._adopt(view)
            case CasFailed():
                return replace(self, in_flight=None, retry_at=now + self.timeouts.heartbeat), ()
            case Proof(deaths):
                return self._bury(deaths)
            case SpareGone(member, evidence):
                return self._bury((Death(member, evidence),))
            case Stalled(member, evidence):
                return self._fence(member, evidence)
            case Suspicion():
                if event.member == self.me.id:
                    return self, ()
                others = {s for s in self.suspicions if (s.member, s.observer) != (event.member, event.observer)}
                return replace(self, suspicions=frozenset({*others, event})), ()
            case Cleared(member, observer):
                left = {s for s in self.suspicions if (s.member, s.observer) != (member, observer)}
                return replace(self, suspicions=frozenset(left)), ()
            case SpareAnnounced(member):
                return self._welcome(member), ()
            case LocalFinished():
                return replace(self, finished=True), ()
            case Tick():
                return self, ()

    def _adopt(self, view: View | None) -> Step:
        """Take over a newer view. Older ones, and ones already known, change nothing: epochs never go back."""
        old = self.view
        if view is None or (old is not None and view.epoch <= old.epoch):
            return self, ()
        ids = {member.id for member in view.members}
        was_in = old is not None and old.rank_of(self.me.id) is not None
        effects: tuple[Effect, ...] = ()
        if old is not None and was_in and old.phase == "running":
            lost = self.lost()
            left = tuple(Death(m.id, lost.get(m.id, view.reason)) for m in old.members if m.id not in ids)
            effects = (Revoke(old.epoch, left, f"epoch {view.epoch} replaces it: {view.reason}"),)
        departed = {member.id for member in old.members} - ids if old is not None else set[str]()
        state = replace(
            self,
            view=view,
            gone=tuple(death for death in self.gone if death.id not in departed),
            spares=tuple(spare for spare in self.spares if spare.id not in ids),
            suspicions=frozenset(s for s in self.suspicions if s.member in ids and s.observer in ids),
            wanted=(),
            short_since=None,
        )
        if self.me.id not in ids and was_in:
            return replace(state, ended="evicted"), (*effects, Evicted(view, view.reason))
        if view.phase == "finished":
            return replace(state, ended="finished"), (*effects, Install(view))
        if view.phase == "failed":
            return replace(state, ended="failed"), (*effects, Install(view))
        if view.phase == "running":
            effects = (*effects, Install(view) if self.me.id in ids else AnnounceSelf(view))
        return state, effects

    def _bury(self, deaths: tuple[Death, ...]) -> Step:
        known = {death.id for death in self.gone} | {self.me.id}
        new = tuple(death for death in deaths if death.id not in known)
        if not new:
            return self, ()
        ids = {death.id for death in new}
        hosts = {m.peer.host for m in self.watched() if m.id in ids}
        blind = tuple(m for m in self.watched() if m.id not in ids | known and m.peer.host not in hosts)
        state = replace(self, gone=self.gone + new, spares=tuple(spare for spare in self.spares if spare.id not in ids))
        seen_here = self.me.peer.host in hosts
        return state, (Report(new, blind),) if blind and seen_here else ()

    def _fence(self, member_id: str, evidence: str) -> Step:
        target = next((m for m in self.watched() if m.id == member_id), None)
        if target is None or member_id in self.fenced or target.peer.host != self.me.peer.host:
            return self, ()
        return replace(self, fenced=self.fenced | {member_id}), (Fence(target, evidence),)

    def _welcome(self, spare: Member) -> Membership:
        known = {m.id for m in self.spares} | {death.id for death in self.gone} | {self.me.id}
        if spare.id in known or (self.view is not None and self.view.rank_of(spare.id) is not None):
            return self
        return replace(self, spares=(*self.spares, spare))

    def _newly_lost(self, before: Membership) -> tuple[Effect, ...]:
        """The revocation that a proof causes: at once, before anything is agreed."""
        if self.rank() is None or self.view is None:
            return ()
        same_view = self.view is before.view
        if same_view and self.gone is before.gone and self.suspicions is before.suspicions:
            return ()
        lost = self.lost()
        had = before.lost() if same_view else {}
        new = tuple(Death(m.id, lost[m.id]) for m in self.view.members if m.id in lost and m.id not in had)
        if not new:
            return ()
        ranks = ", ".join(f"rank {self.view.rank_of(death.id)}: {death.evidence}" for death in new)
        return (Revoke(self.view.epoch, new, ranks),)

    # What follows from the situation ------------------------------------------------------------------------

    def _decide(self, now: float) -> Step:
        """Propose the view that should come next if this process's turn has come; else say when to look
        again.
        """
        if self.started_at is None or self.in_flight is not None:
            return replace(self, wake_at=None), ()
        refusal = self._refusal()
        if refusal is not None:
            return replace(self, ended="refused", wake_at=None), (Refused(refusal),)
        state = self._measure_shortage(now)
        need = state._need()
        if need is None:
            return replace(state, wanted=(), wake_at=None), ()
        since = state.wanted_since if state.wanted == need.key() else now
        state = replace(state, wanted=need.key(), wanted_since=since)
        due = max(max(since, need.after) + need.turn, state.retry_at)
        if now < due:
            return replace(state, wake_at=due), ()
        expected = 0 if state.view is None else state.view.epoch
        return replace(state, in_flight=need.view, wake_at=None), (Propose(expected, need.view),)

    def _need(self) -> Need | None:
        if self.view is None:
            return Need(self._forming((self.me,), f"{self.me.id} founds the job"), 0.0)
        if self.view.phase == "forming":
            return self._need_while_forming(self.view)
        if self.view.rank_of(self.me.id) is None:
            return self._need_as_spare(self.view)
        return self._need_while_running(self.view)

    def _need_while_forming(self, view: View) -> Need | None:
        lost = self.lost()
        alive = tuple(m for m in view.members if m.id not in lost)
        if view.rank_of(self.me.id) is None:
            return Need(self._forming((*alive, self.me), f"{self.me.id} joins as one of {view.job.size}"), 0.0)
        turn = self._turn(alive)
        if len(alive) < len(view.members):
            words = "; ".join(f"{m.id} is gone: {lost[m.id]}" for m in view.members if m.id in lost)
            return Need(self._forming(alive, words), turn)
        assert self.started_at is not None
        deadline = self.started_at + self.timeouts.join
        words = f"{len(alive)} of {view.job.size} members came within {self.timeouts.join:g} s"
        if len(alive) >= view.job.min_size:
            return Need(self._next("running", alive, words, formed(view.job)), turn, deadline)
        words += f", {view.job.min_size} are needed"
        return Need(self._next("failed", alive, words), turn, deadline)

    def _need_as_spare(self, view: View) -> Need | None:
        lost = self.lost()
        if any(m.id not in lost for m in view.members):
            return None
        return Need(self._next("failed", (), "every member died, and the state of the job with them"), 0.0)

    def _need_while_running(self, view: View) -> Need | None:
        lost = self.lost()
        alive = tuple(m for m in view.members if m.id not in lost)
        turn = self._turn(alive)
        if self.finished:
            return Need(self._next("finished", alive, "all steps are committed"), turn)
        next_up = successors(view, lost, self.spares)
        if next_up.members == view.members:
            return None
        if len(next_up.members) < view.job.min_size:
            assert self.short_since is not None
            words = (
                f"{next_up.reason}; {len(next_up.members)} are left of the {view.job.min_size} needed, "
                f"and nobody came within {self.timeouts.join:g} s"
            )
            return Need(self._next("failed", alive, words), turn, self.short_since + self.timeouts.join)
        if len(alive) == len(view.members):
            turn += self.timeouts.heartbeat
        return Need(self._next("running", next_up.members, next_up.reason), turn)

    def _measure_shortage(self, now: float) -> Membership:
        view = self.view
        if view is None or view.phase != "running" or view.rank_of(self.me.id) is None:
            return self
        short = len(successors(view, self.lost(), self.spares).members) < view.job.min_size
        if short == (self.short_since is not None):
            return self
        return replace(self, short_since=now if short else None)

    def _refusal(self) -> str | None:
        """Why this process, which is in no view yet, can never be in this job; None if it can."""
        view = self.view
        if view is None:
            return None if self.job.backends else "this process can run no backend"
        if view.rank_of(self.me.id) is not None:
            return None
        conflict = self.job.conflict(view.job)
        if conflict is not None:
            return conflict
        mine, theirs = ", ".join(self.job.backends) or "none", ", ".join(view.job.backends)
        if view.phase == "forming" and not self._forming((*view.members, self.me), "").job.backends:
            return f"no backend suits all: the members so far can run {theirs}, this process {mine}"
        if view.job.backend and view.job.backend not in self.job.backends:
            return f"the job runs on {view.job.backend}, which this process cannot run; it can run {mine}"
        return None

    def _forming(self, members: tuple[Member, ...], reason: str) -> View:
        job = self.job if self.view is None else self.view.job
        job = replace(job, backends=runnable(job.backends, self.job.backends, self.one_host, members))
        if len(members) < job.size or not job.backends:
            return self._next("forming", members, reason, job)
        return self._next("running", members, f"all {job.size} members are here", formed(job))

    def _next(self, phase: Phase, members: tuple[Member, ...], reason: str, job: Job | None = None) -> View:
        if self.view is None:
            return View(1, phase, members, job or self.job, reason)
        return View(self.view.epoch + 1, phase, members, job or self.view.job, reason)

    def _turn(self, alive: tuple[Member, ...]) -> float:
        """How long this process leaves it to the members before it."""
        before = [m.id for m in alive].index(self.me.id)
        return before * self.timeouts.heartbeat
