"""Decides which members get the evidence that this process has seen, and which a new view: pure functions.

In a small job evidence goes to all members that may not see it themselves, and the proposer of a view tells all. In a
large one evidence goes to the heads and, if that has no effect, to the members after them; and the proposer tells its
neighbours, and each member that learns of the view tells its own neighbours, once: the view reaches all members in
about log N steps, although some may have died. So the load of a member does not grow with the size of the job.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from holdfast.ft.membership.events import (
    Announce,
    Cleared,
    Death,
    Effect,
    Event,
    ProvenDeaths,
    ReadRegister,
    Report,
    Suspicion,
)
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.topology import Shape, heads, host_mates, observers
from holdfast.ft.membership.view import Member, View, ViewDelta, delta_between, last_delta


def another_proposes_first(view: View | None, me: Member, lost: Container[str]) -> bool:
    """Whether another member of this host is the first to propose the view after the loss of `lost`.

    It sees processes end as soon as this one does, and processors are few while all members recover.
    """
    if view is None or view.phase != "running" or view.rank_of(me.id) is None:
        return False
    first = next((member for member in view.members if member.id not in lost), me)
    return first.id != me.id and first.peer.host == me.peer.host


@dataclass(frozen=True, slots=True)
class Findings:
    """What `me` reports:

    `deaths` on its own host, and in `seen` members of other hosts that it suspects or has cleared.
    """

    deaths: tuple[Death, ...]
    seen: tuple[Suspicion | Cleared, ...]


def new_findings(event: Event, me: Member, view: View, evidence: Evidence, before: Evidence) -> Findings:
    """What `event` added to the findings of this process; `evidence` is after it, `before` before it."""
    deaths: tuple[Death, ...] = ()
    seen: tuple[Suspicion | Cleared, ...] = ()
    match event:
        case ProvenDeaths(proven):
            new = (
                each
                for each in dict.fromkeys(death.id for death in proven)
                if each in evidence.dead and (each not in before.dead or each in before.unreachable)
            )
            deaths = _seen_dead(me, view, evidence, new)
        case Suspicion(member_id, me.id) | Cleared(member_id, me.id) if member_id in view.ranks:
            doubted = me.id in evidence.suspected.get(member_id, {})
            doubted_before = me.id in before.suspected.get(member_id, {})
            if doubted != doubted_before and (doubted or member_id not in evidence.dead):
                seen = (_suspicion(me, evidence, member_id) if doubted else _clearance(me, evidence, member_id),)
    return Findings(deaths, seen)


def open_findings(me: Member, view: View, evidence: Evidence) -> Findings:
    """All findings that must be repeated until a new view follows; withdrawn suspicions are repeated too."""
    seen: list[Suspicion | Cleared] = []
    for member_id, said in evidence.statements.items():
        if me.id in said and member_id not in evidence.dead and member_id in view.ranks:
            doubted = me.id in evidence.suspected.get(member_id, {})
            seen.append(_suspicion(me, evidence, member_id) if doubted else _clearance(me, evidence, member_id))
    return Findings(_seen_dead(me, view, evidence, evidence.dead), tuple(seen))


def need_repeating(findings: Findings) -> bool:
    """Whether the findings must have an effect: cleared members alone need not be reported for ever."""
    return bool(findings.deaths) or any(isinstance(word, Suspicion) for word in findings.seen)


def _suspicion(me: Member, evidence: Evidence, member_id: str) -> Suspicion:
    return Suspicion(member_id, me.id, evidence.suspected[member_id][me.id], evidence.statements[member_id][me.id])


def _clearance(me: Member, evidence: Evidence, member_id: str) -> Cleared:
    return Cleared(member_id, me.id, evidence.statements[member_id][me.id])


def reports(
    findings: Findings, me: Member, view: View, spares: tuple[Member, ...], evidence: Evidence, shape: Shape, turn: int
) -> tuple[Effect, ...]:
    """The effects that report `findings`, for the `turn`-th time."""
    if shape.is_mesh(view):
        recipients = [m for m in (*view.members, *spares) if m.id != me.id]
    else:
        doubtful = {word.member for word in findings.seen} | evidence.lost.keys()
        recipients = [m for m in heads(view, doubtful, shape, turn) if m.id != me.id]
    to = tuple(m for m in recipients if m.id not in evidence.dead)
    blind = tuple(m for m in to if m.peer.host != me.peer.host)
    effects: list[Effect] = []
    if findings.deaths and blind:
        effects.append(Report(ProvenDeaths(findings.deaths), blind))
    if to:  # the suspects too: if only one direction is cut, they learn that this side has stopped
        effects += [Report(word, to) for word in findings.seen]
    return tuple(effects)


def _seen_dead(me: Member, view: View, evidence: Evidence, ids: Iterable[str]) -> tuple[Death, ...]:
    """The proven deaths of those among `ids` that are members on this host."""
    proven = (each for each in ids if each in view.ranks and each not in evidence.unreachable)
    here = (each for each in proven if view.members[view.ranks[each]].peer.host == me.peer.host)
    return tuple(Death(each, evidence.dead[each]) for each in here)


def announce_as_proposer(view: View, me: Member, spares: tuple[Member, ...], shape: Shape) -> tuple[Effect, ...]:
    """The announcement of `view` by its proposer `me`: in a large job to its host, beside what it forwards."""
    mesh = shape.is_mesh(view)
    others = (*view.members, *spares) if mesh else host_mates(view, me)
    to = tuple(m for m in others if m.id != me.id)
    return (Announce(view, to, None if mesh else last_delta(view)),) if to else ()


def forward_view(
    view: View, old: View | None, teller: str, me: Member, spares: tuple[Member, ...], shape: Shape
) -> tuple[Effect, ...]:
    """In a large job, tell the neighbours of `me` about `view`, which `teller` announced and which follows `old`."""
    if shape.is_mesh(view):
        return ()
    around = observers(view, me, shape) if view.rank_of(me.id) is not None else ()
    to = tuple(m for m in (*around, *spares) if m.id != teller)
    change = delta_between(old, view) if old is not None else None
    return (Announce(view, to, change),) if to else ()


def reply_to_epoch(view: View | None, member: Member, epoch: int, shape: Shape) -> tuple[Effect, ...]:
    """The reply when `member` shows that it is in `epoch`: send it the newest view, or read the register."""
    if view is None or epoch > view.epoch:
        return (ReadRegister(epoch),)
    if epoch == view.epoch:
        return ()
    change: ViewDelta | None = None
    if epoch == view.epoch - 1 and not shape.is_mesh(view):
        change = last_delta(view)
    return (Announce(view, (member,), change),)
