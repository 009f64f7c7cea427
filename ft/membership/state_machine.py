"""The membership state machine: every decision about which processes are in the job.

`Membership.on(event, now)` returns the next state and the effects to carry out. It uses no clock, network, thread or
randomness, so the same class runs under the real runtime, a simulator and an exhaustive explorer.

The register holds one view per epoch, replaced only by compare-and-set, so two views of one epoch cannot exist. A
member that finds that the view should change computes the next one; the lowest living member proposes it at once, each
further member one heartbeat later if no new view has appeared. After every event the whole state is evaluated again, so
a lost message, a lost race or another death needs no case of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData
from holdfast.ft.membership.dissemination import (
    announce_as_proposer,
    forward_view,
    need_repeating,
    new_findings,
    open_findings,
    reply_to_epoch,
    reports,
)
from holdfast.ft.membership.events import (
    AnnounceSelf,
    CasFailed,
    CasLost,
    CasWon,
    Cleared,
    Death,
    Effect,
    EpochBroken,
    EpochHeard,
    Event,
    Evicted,
    Fence,
    Install,
    LocalFailed,
    LocalFinished,
    Propose,
    ProvenDeaths,
    ReadRegister,
    Refused,
    Revoke,
    SpareAnnounced,
    Stalled,
    Started,
    Suspicion,
    Tick,
    Unreachable,
    ViewDeltaReceived,
    ViewRead,
)
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.topology import Shape, heads, host_mates, observers
from holdfast.ft.membership.view import Job, Member, Phase, StepError, Timeouts, View, ViewDelta, apply_delta

MAX_NAMED_CHANGES = 8
"""The number of changes that a reason names one by one."""


@dataclass(frozen=True, slots=True)
class NextMembers:
    """The members of a next view in rank order, and the reason for them."""

    members: tuple[Member, ...]
    reason: str


def successors(view: View, gone: Mapping[str, str], spares: Sequence[Member]) -> NextMembers:
    """The members after those in `gone` (id -> evidence) are replaced.

    Survivors keep their order, a spare takes the rank of a dead member, ranks without a spare close up, and further
    spares come last as long as the job wants more members.
    """
    waiting = [spare for spare in spares if spare.id not in gone]
    members: list[Member] = []
    words: list[str] = []
    for rank, member in enumerate(view.members):
        if member.id not in gone:
            members.append(member)
            continue
        lost = f"rank {rank} ({member.id}) is gone: {gone[member.id]}"
        if waiting:
            members.append(waiting.pop(0))
            words.append(f"{lost}; spare {members[-1].id} takes its place")
        else:
            words.append(f"{lost}; no spare")
    while waiting and len(members) < view.job.size:
        members.append(waiting.pop(0))
        words.append(f"{members[-1].id} joins as rank {len(members) - 1}")
    if len(words) > MAX_NAMED_CHANGES:
        words[MAX_NAMED_CHANGES:] = [f"and {len(words) - MAX_NAMED_CHANGES} more changes"]
    return NextMembers(tuple(members), "; ".join(words))


def next_size(view: View, lost: int, waiting: int) -> int:
    """The number of members that `successors` returns for `lost` members and `waiting` spares."""
    alive, replaced = len(view.members) - lost, min(lost, waiting)
    return max(alive + replaced, min(view.job.size, alive + waiting))


def runnable_backends(
    backends: Sequence[str], usable: Sequence[str], one_host: frozenset[str], members: Sequence[Member]
) -> tuple[str, ...]:
    """Those of `backends`, in their order, that are usable here and work across the hosts of `members`."""
    spread = len({member.peer.host for member in members}) > 1
    return tuple(name for name in backends if name in usable and not (spread and name in one_host))


def with_chosen_backend(job: Job) -> Job:
    """The job with its backend chosen: the first one that every member can run."""
    return msgspec.structs.replace(job, backend=job.backends[0])


def refusal_reason(me: Member, mine: Job, one_host: frozenset[str], view: View | None) -> str | None:
    """Why the process `me` can never join the job; None if it can, or is in `view`.

    It would found the job as `mine`. `one_host` are those of its backends that need all members on one host.
    """
    if view is None:
        return None if mine.backends else "this process can run no backend"
    if view.rank_of(me.id) is not None:
        return None
    conflict = mine.conflict(view.job)
    if conflict is not None:
        return conflict
    loopback = loopback_refusal_reason(me, view)
    if loopback is not None:
        return loopback
    own, theirs = ", ".join(mine.backends) or "none", ", ".join(view.job.backends)
    if view.phase == "forming" and not runnable_backends(
        view.job.backends, mine.backends, one_host, (*view.members, me)
    ):
        return f"no backend suits all: the members so far can run {theirs}, this process {own}"
    if view.job.backend and view.job.backend not in mine.backends:
        return f"the job runs on {view.job.backend}, which this process cannot run; it can run {own}"
    return host_refusal_reason(me.peer.host, one_host, view)


def host_refusal_reason(host: str, one_host: Collection[str], view: View) -> str | None:
    """Why processes on `host` cannot join the running `view`; None if they can.

    They cannot if its backend is one of `one_host`, which need all members on one host, and its members are elsewhere.
    """
    if view.phase != "running" or view.job.backend not in one_host or host in view.hosts:
        return None
    return (
        f"the job runs on {view.job.backend}, which needs all members on one host: "
        f"they are on {', '.join(view.hosts)}, this process is on {host}"
    )


def loopback_refusal_reason(me: Member, view: View) -> str | None:
    """Why `me` and the members of `view` cannot reach each other: one listens on loopback, on another machine.

    None if they can. A host that is simulated on this machine (the third part of its name) is reached by loopback.
    """
    machine = _machine(me.peer.host)
    strangers = [view.members[ranks[0]] for host, ranks in view.hosts.items() if _machine(host) != machine]
    if strangers and _on_loopback(me):
        return (
            f"this process listens on {me.address}, and the job has members on another host, which cannot reach it: "
            "choose an address by HOLDFAST_INTERFACE or interface="
        )
    hidden = next((member for member in strangers if _on_loopback(member)), None)
    if hidden is None:
        return None
    return (
        f"member {hidden.id} on another host listens on {hidden.address}, where this process cannot reach it: choose "
        "an address on that host by HOLDFAST_INTERFACE or interface="
    )


def _machine(host: str) -> list[str]:
    return host.split("/")[:2]


def _on_loopback(member: Member) -> bool:
    return member.address.startswith(("127.", "[::1]"))


Ended = Literal["", "finished", "failed", "evicted", "refused"]
Step = tuple["Membership", tuple[Effect, ...]]
Wanted = tuple[str | int, ...]

DOUBLINGS = 4
"""How often the interval between two reports of the same evidence doubles."""


@dataclass(frozen=True, slots=True)
class PlannedProposal:
    """A view to propose, which `make` computes: not before `after`, and then `turn` seconds later on this process.

    `why` changes when the reasons do.
    """

    why: Wanted
    make: Callable[[], View]
    turn: float
    after: float = 0.0


class Membership(Struct, frozen=True):
    """What one process knows of the job, and what it concludes. Immutable. Times are those of `on`."""

    me: Member
    """This process."""
    job: Job
    """The job as this process would found it: `backends` are those that it can run, in its order of preference."""
    timeouts: Timeouts
    one_host: frozenset[str] = frozenset()
    """Those of `job.backends` that need all members on one host."""
    shape: Shape = Shape()
    view: View | None = None
    """The newest view known, in any phase."""
    ended: Ended = ""
    """Set once nothing more can happen here; later events change nothing."""
    evidence: Evidence = Evidence()
    spares: tuple[Member, ...] = ()
    """The processes that wait outside of the view, in the order in which they announced themselves."""
    fenced: frozenset[str] = frozenset()
    """The members of this host that were to be killed: each is asked for once, the runtime repeats the signal."""
    finished: LocalFinished | None = None
    """All steps are committed here, or all members have stopped, in the epoch of `view`; a new view clears it."""
    failed: LocalFailed | None = None
    """The user's code raised here, and the job has to end with that, in whichever epoch."""
    started_at: float | None = None
    """When this process asked to take part; None before, when it only listens."""
    in_flight: View | None = None
    """The view that the register is asked for: a second proposal before the answer could overtake the first."""
    wanted: Wanted = ()
    """Why this process wants another view (`PlannedProposal.why`); () if it wants none."""
    wanted_since: float = 0.0
    """Since when it wants it for this reason. The turns of the members count from here, so a new reason starts anew."""
    short_since: float | None = None
    """Since when fewer members are left than the job needs: after `timeouts.join` the job fails. None if enough are."""
    revoked: int = 0
    """The newest epoch that was revoked here by a loss or a failed op. It cannot go on, whatever is heard later."""
    broken: str = ""
    """The error of the op that failed, if that revoked the epoch of `view`."""
    retry_at: float = 0.0
    """No proposal before this time: the register was away, or another process has just won."""
    told: int = 0
    """How often the evidence in this view was reported. It lengthens the pauses, and widens who gets it."""
    tell_at: float | None = None
    """When to report it again; None if all know."""
    wake_at: float | None = None
    """The time for the next `Tick`; None if none is needed."""

    def on(self, event: Event, now: float) -> Step:
        """The state after `event` at time `now` (seconds, never decreasing), and the effects to carry out."""
        if self.ended:
            return self, ()
        state, effects = self._absorb(event, now)
        if state is self and not isinstance(event, Tick):  # nothing new, so nothing to conclude: beats are frequent
            return self, effects
        if state.ended:
            return replace(state, wake_at=None), effects
        state, revoked = state._revoke_after_losses(self)
        state, told = state._report(self, event, now)
        state, more = state._decide(now)
        return state._wake_for_report(now), effects + revoked + told + more

    def rank(self) -> int | None:
        """This process's rank in a running view; None outside of one."""
        if self.view is None or self.view.phase != "running":
            return None
        return self.view.rank_of(self.me.id)

    def watched(self) -> tuple[Member, ...]:
        """The processes that this one watches: all others in a small job.

        In a large one these are the members of its own host and its neighbours on others; a head also watches the
        spares, a spare the heads. A process for which the job has ended watches none.
        """
        if self.ended:
            return ()
        view = self.view
        if view is None:
            members: tuple[Member, ...] = ()
        elif self.shape.is_mesh(view):
            members = view.members
        elif view.rank_of(self.me.id) is None:
            members = (*heads(view, self.evidence.lost, self.shape), *host_mates(view, self.me))
        else:
            members = (*host_mates(view, self.me), *observers(view, self.me, self.shape))
        return tuple({m.id: m for m in (*members, *self.spares) if m.id != self.me.id}.values())

    # Apply an event ----------------------------------------------------------------------------------

    def _absorb(self, event: Event, now: float) -> Step:
        match event:
            case Started():
                return replace(self, started_at=now), ()
            case ViewRead(view, teller):
                return self._adopt(view, teller)
            case ViewDeltaReceived(change, teller):
                return self._apply(change, teller)
            case EpochHeard(member, epoch):
                return self, reply_to_epoch(self.view, member, epoch, self.shape)
            case CasWon(view):
                state, effects = replace(self, in_flight=None)._adopt(view)
                return state, (*effects, *announce_as_proposer(view, self.me, state.spares, self.shape))
            case CasLost(view):
                lost = replace(self, in_flight=None)
                if view is None or (self.view is not None and view.epoch <= self.view.epoch):
                    # the register holds nothing newer: it was restored, or answers late; do not ask in a tight loop
                    return replace(lost, retry_at=now + self.timeouts.heartbeat), ()
                return lost._adopt(view)
            case CasFailed():
                return replace(self, in_flight=None, retry_at=now + self.timeouts.heartbeat), ()
            case ProvenDeaths(deaths):
                return self._with_losses(self.evidence.with_deaths(self._others(deaths), self.view, self.shape)), ()
            case Unreachable(member, evidence):
                if member == self.me.id:
                    return self, ()
                return self._with_losses(self.evidence.with_unreachable(event, self.view, self.shape)), ()
            case EpochBroken(epoch, reason):
                if self.rank() is None or self.view is None or self.view.epoch != epoch or self.revoked == epoch:
                    return self, ()
                return replace(self, revoked=epoch, broken=reason), (Revoke(epoch, (), reason),)
            case Stalled(member, evidence):
                return self._fence(member, evidence)
            case Suspicion():
                if event.member == self.me.id:
                    return self, ()
                return self._with_evidence(self.evidence.with_suspicion(event, self.view, self.shape)), ()
            case Cleared():
                return self._with_evidence(self.evidence.with_clearance(event, self.view, self.shape)), ()
            case SpareAnnounced(member):
                return self._add_spare(member), ()
            case LocalFinished(epoch):
                is_now = self.view is not None and self.view.epoch == epoch
                return (replace(self, finished=event) if is_now else self), ()
            case LocalFailed():
                return replace(self, failed=event), ()
            case Tick():
                return self, ()

    def _with_evidence(self, evidence: Evidence) -> Membership:
        return self if evidence is self.evidence else replace(self, evidence=evidence)

    def _apply(self, change: ViewDelta, teller: str) -> Step:
        """Adopt the view that a delta leads to. A process that lacks the view before it reads the register."""
        view = self.view
        if view is not None and change.epoch <= view.epoch:
            return self, ()
        if view is None or change.epoch != view.epoch + 1:
            return self, (ReadRegister(change.epoch),)
        try:
            return self._adopt(apply_delta(view, change), teller)
        except CorruptData:  # it is the difference to another view: only the register can say which one is right
            return self, (ReadRegister(change.epoch),)

    def _adopt(self, view: View | None, teller: str = "") -> Step:
        """Adopt a newer view. Older and known ones change nothing: epochs never go back."""
        old = self.view
        if view is None or (old is not None and view.epoch <= old.epoch):
            return self, ()
        is_in = view.rank_of(self.me.id) is not None
        was_in = old is not None and old.rank_of(self.me.id) is not None
        departed = view.left_since(old) if old is not None else ()
        effects: tuple[Effect, ...] = ()
        if old is not None and was_in and old.phase == "running":  # its ops may wait for members that left
            left = self.evidence.deaths_of(departed, view)
            effects = (Revoke(old.epoch, left, f"epoch {view.epoch} replaces it: {view.reason}"),)
        state = replace(
            self,
            view=view,
            evidence=self.evidence.for_view(view, departed, self.shape),
            spares=tuple(spare for spare in self.spares if spare.id not in view.ranks) if self.spares else (),
            finished=None,
            broken="",
            wanted=(),
            short_since=None,
            told=0,
            tell_at=None,
        )
        if not is_in and was_in:
            return replace(state, ended="evicted"), (*effects, Evicted(view, view.reason))
        spread = forward_view(view, old, teller, self.me, state.spares, self.shape)
        if view.phase in ("finished", "failed"):
            effects = (*effects, Install(view), *spread)
            return replace(state, ended="finished" if view.phase == "finished" else "failed"), effects
        if view.phase == "running":
            if is_in:
                effects = (*effects, Install(view))
            else:
                to = view.members if self.shape.is_mesh(view) else heads(view, (), self.shape)
                effects = (*effects, AnnounceSelf(view, to))
        return state, (*effects, *spread)

    def _others(self, deaths: tuple[Death, ...]) -> tuple[Death, ...]:
        return tuple(death for death in deaths if death.id != self.me.id)

    def _with_losses(self, evidence: Evidence) -> Membership:
        """Take over the evidence, and forget spares that are lost for certain."""
        if evidence is self.evidence:
            return self
        spares = self.spares
        if any(spare.id in evidence.dead for spare in spares):
            spares = tuple(spare for spare in spares if spare.id not in evidence.dead)
        return replace(self, evidence=evidence, spares=spares)

    def _fence(self, member_id: str, evidence: str) -> Step:
        target = next((m for m in self.watched() if m.id == member_id), None)
        if target is None or member_id in self.fenced or target.peer.host != self.me.peer.host:
            return self, ()  # only a process of the same host can send the signal
        return replace(self, fenced=self.fenced | {member_id}), (Fence(target, evidence),)

    def _add_spare(self, spare: Member) -> Membership:
        known = spare.id == self.me.id or spare.id in self.evidence.dead or any(m.id == spare.id for m in self.spares)
        if known:
            return self
        view = self.view
        if view is not None and (
            spare.id in view.ranks or host_refusal_reason(spare.peer.host, self.one_host, view) is not None
        ):
            return self
        return replace(self, spares=(*self.spares, spare))

    def _revoke_after_losses(self, before: Membership) -> Step:
        """Revoke the epoch because of new losses: at once, before any agreement."""
        view, lost = self.view, self.evidence.lost
        if self.rank() is None or view is None or not lost:
            return self, ()
        had = before.evidence.lost if view is before.view else {}
        if lost is had:
            return self, ()
        ids = sorted((each for each in lost if each not in had and each in view.ranks), key=view.ranks.__getitem__)
        if not ids:  # a spare, or a member that a newer view has left out
            return self, ()
        new = tuple(Death(each, lost[each]) for each in ids)
        ranks = ", ".join(f"rank {view.ranks[death.id]}: {death.evidence}" for death in new)
        return replace(self, revoked=view.epoch), (Revoke(view.epoch, new, ranks),)

    # Report evidence ----------------------------------------------------------------------

    def _report(self, before: Membership, event: Event, now: float) -> Step:
        """Report what this process has seen: at once, and repeatedly until a new view follows."""
        view = self.view
        if self.evidence is before.evidence and view is before.view:
            if self.tell_at is None or now < self.tell_at:
                return self, ()
        elif not self.evidence.dead and not self.evidence.statements and self.tell_at is None:
            return self, ()
        if self.rank() is None or view is None:
            return self, ()
        if view is before.view and self.evidence is not before.evidence:
            turn, findings = 0, new_findings(event, self.me, view, self.evidence, before.evidence)
            if not findings.deaths and not findings.seen:
                return self, ()
        else:
            # a new view, or the time to repeat: all that is open, since any message may have been lost
            turn, findings = self.told, open_findings(self.me, view, self.evidence)
            if not need_repeating(findings) and (not findings.seen or turn > DOUBLINGS):
                return replace(self, tell_at=None), ()
        effects = reports(findings, self.me, view, self.spares, self.evidence, self.shape, turn)
        if not effects and self.shape.is_mesh(view):  # all see it themselves; in a large job others become heads
            return replace(self, tell_at=None), ()
        wait = self.timeouts.heartbeat * 2 ** min(turn, DOUBLINGS)
        return replace(self, told=turn + 1, tell_at=now + wait), effects

    # Propose the next view ------------------------------------------------------------------------

    def _wake_for_report(self, now: float) -> Membership:
        """Set `wake_at` no later than the time of the next report."""
        if self.ended or self.tell_at is None or (self.wake_at is not None and self.wake_at <= self.tell_at):
            return self
        return replace(self, wake_at=self.tell_at)

    def _decide(self, now: float) -> Step:
        """Propose the next view if it is this process's turn; otherwise set the time to check again."""
        if self.started_at is None or self.in_flight is not None:  # the answer of the register wakes it
            return self._with_wake_at(None), ()
        why = refusal_reason(self.me, self.job, self.one_host, self.view)
        if why is not None:
            return replace(self, ended="refused", wake_at=None), (Refused(why),)
        state = self._measure_shortage(now)
        need = state._next_proposal()
        if need is None:
            return (replace(state, wanted=()) if state.wanted else state)._with_wake_at(None), ()
        since = state.wanted_since if state.wanted == need.why else now
        due = max(max(since, need.after) + need.turn, state.retry_at)
        if now < due:
            return replace(state, wanted=need.why, wanted_since=since, wake_at=due), ()
        view = need.make()  # computed only now, from all that has come since it was wanted
        expected = 0 if state.view is None else state.view.epoch
        state = replace(state, wanted=need.why, wanted_since=since, in_flight=view, wake_at=None)
        return state, (Propose(expected, view),)

    def _with_wake_at(self, at: float | None) -> Membership:
        return self if self.wake_at == at else replace(self, wake_at=at)

    def _next_proposal(self) -> PlannedProposal | None:
        if self.view is None:
            return PlannedProposal(("found",), lambda: self._forming((self.me,), f"{self.me.id} founds the job"), 0.0)
        if self.view.phase == "forming":
            return self._proposal_while_forming(self.view)
        if self.view.rank_of(self.me.id) is None:
            return self._proposal_as_spare(self.view)
        return self._proposal_while_running(self.view)

    def _proposal_while_forming(self, view: View) -> PlannedProposal | None:
        alive, lost = self._alive(view), self.evidence.lost
        if view.rank_of(self.me.id) is None:
            words = f"{self.me.id} joins as one of {view.job.size}"
            return PlannedProposal(("join", view.epoch), lambda: self._forming((*alive, self.me), words), 0.0)
        turn = self._turn(view)
        if len(alive) < len(view.members):
            words = "; ".join(f"{m.id} is gone: {lost[m.id]}" for m in view.members if m.id in lost)
            return PlannedProposal(("lost", *(m.id for m in alive)), lambda: self._forming(alive, words), turn)
        assert self.started_at is not None
        deadline = self.started_at + self.timeouts.join
        words = f"{len(alive)} of {view.job.size} members came within {self.timeouts.join:g} s"
        if len(alive) >= view.job.min_size:
            return PlannedProposal(
                ("enough", *(m.id for m in alive)),
                lambda: self._next("running", alive, words, with_chosen_backend(view.job)),
                turn,
                deadline,
            )
        short = f"{words}, {view.job.min_size} are needed"
        return PlannedProposal(
            ("few", *(m.id for m in alive)), lambda: self._next("failed", alive, short), turn, deadline
        )

    def _proposal_as_spare(self, view: View) -> PlannedProposal | None:
        lost = self.evidence.lost
        if len(lost) < len(view.members) or any(m.id not in lost for m in view.members):
            return None
        words = "every member died, and the state of the job with them"
        return PlannedProposal(("all lost",), lambda: self._next("failed", (), words), 0.0)

    def _proposal_while_running(self, view: View) -> PlannedProposal | None:
        turn = self._turn(view)
        if self.failed is not None:
            failed = self.failed
            return PlannedProposal(
                ("raised",), lambda: self._ended(view, "failed", failed.reason, error=failed.error), 0.0
            )
        if self.finished is not None:
            done = self.finished
            return PlannedProposal(
                ("finished",), lambda: self._ended(view, "finished", done.reason, stopped=done.stopped), turn
            )
        lost, waiting = self._lost_members(view), self._waiting()
        if lost and self._goes_on_degraded(view, lost):
            return PlannedProposal(("degraded", lost), lambda: self._next_degraded(view), turn)
        if view.degraded_from and not lost and self.revoked != view.epoch:
            return None  # spares wait until a member asks for a rebuild
        if not lost and not (waiting and len(view.members) < view.job.size):
            if self.revoked == view.epoch:  # its ops have ended with an error here: the epoch cannot be taken up again
                words = "nobody is lost after all: who was taken for it is heard again"
                if self.broken:
                    words = f"nobody is lost, but an op has failed: {self.broken}"
                if view.degraded_from:
                    words = f"a communicator is built again: {self.broken or words}"
                return PlannedProposal(("again",), lambda: self._next("running", view.members, words), turn)
            return None
        if next_size(view, lost, waiting) < view.job.min_size:
            assert self.short_since is not None
            deadline = self.short_since + self.timeouts.join
            return PlannedProposal(("short", lost, waiting), lambda: self._too_few(view), turn, deadline)
        if not lost or self.evidence.more_losses_likely(view):  # one view for all that comes now, not one for each
            turn += self.timeouts.heartbeat
        return PlannedProposal(("running", lost, waiting), lambda: self._next_running(view), turn)

    def _ended(
        self, view: View, phase: Phase, reason: str, *, stopped: bool = False, error: StepError | None = None
    ) -> View:
        return replace(self._next(phase, self._alive(view), reason), stopped=stopped, error=error)

    def _next_running(self, view: View) -> View:
        next_up = successors(view, self.evidence.lost, self.spares)
        return self._next("running", next_up.members, next_up.reason)

    def _goes_on_degraded(self, view: View, lost: int) -> bool:
        """Whether the members of the next view keep the communicator that they have, and build none.

        Not if an op has failed in it (a member asks for a rebuild by that), too few are left, or one that is lost may
        live: it could exchange results with some of the others, so that they have not the same.
        """
        if view.job.on_death == "rebuild" or self.broken or not self.evidence.proves(view):
            return False
        return len(view.members) - lost >= view.job.min_size

    def _next_degraded(self, view: View) -> View:
        next_up = successors(view, self.evidence.lost, ())
        following = self._next("running", next_up.members, f"{next_up.reason}; the others go on without a rebuild")
        return replace(following, degraded_from=view.degraded_from or view.epoch)

    def _too_few(self, view: View) -> View:
        next_up = successors(view, self.evidence.lost, self.spares)
        words = (
            f"{next_up.reason}; {len(next_up.members)} are left of the {view.job.min_size} needed, "
            f"and nobody came within {self.timeouts.join:g} s"
        )
        return self._next("failed", self._alive(view), words)

    def _alive(self, view: View) -> tuple[Member, ...]:
        return tuple(m for m in view.members if m.id not in self.evidence.lost)

    def _lost_members(self, view: View) -> int:
        return sum(map(view.ranks.__contains__, self.evidence.lost))

    def _waiting(self) -> int:
        """The number of spares that can be promoted."""
        return sum(spare.id not in self.evidence.lost for spare in self.spares)

    def _measure_shortage(self, now: float) -> Membership:
        """Set or clear the time since which too few members are left."""
        view = self.view
        if view is None or view.phase != "running" or view.rank_of(self.me.id) is None:
            return self
        short = next_size(view, self._lost_members(view), self._waiting()) < view.job.min_size
        if short == (self.short_since is not None):
            return self
        return replace(self, short_since=now if short else None)

    def _forming(self, members: tuple[Member, ...], reason: str) -> View:
        job = self.job if self.view is None else self.view.job
        job = replace(job, backends=runnable_backends(job.backends, self.job.backends, self.one_host, members))
        if len(members) < job.size or not job.backends:
            return self._next("forming", members, reason, job)
        return self._next("running", members, f"all {job.size} members are here", with_chosen_backend(job))

    def _next(self, phase: Phase, members: tuple[Member, ...], reason: str, job: Job | None = None) -> View:
        if self.view is None:
            return View(1, phase, members, job or self.job, reason)
        return View(self.view.epoch + 1, phase, members, job or self.view.job, reason)

    def _turn(self, view: View) -> float:
        """Seconds that this process leaves the proposal to the members before it.

        One heartbeat for each of the first members, and then ever less, so that in a job of any size a member proposes
        soon.
        """
        before, first = view.before(self.me.id, self.evidence.lost.keys()), self.shape.heads
        beats = before if before <= first else first + math.log2(before / first)
        return beats * self.timeouts.heartbeat
