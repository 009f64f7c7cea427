"""Decides which members get the evidence that this process has seen: pure functions.

In a small job these are all members that may not see it themselves. In a large one these are the heads and, if that has
no effect, the members after them: so the load of a member does not grow with the size of the job.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from holdfast.ft.membership.effects import Effect, ReportDeaths, ReportSuspicions
from holdfast.ft.membership.events import Cleared, Death, Event, ProvenDeaths, Suspicion
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.topology import Shape, heads
from holdfast.ft.membership.view import Member, View


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
        effects.append(ReportDeaths(findings.deaths, blind))
    if findings.seen and to:  # the suspects too: if only one direction is cut, they learn that this side has stopped
        effects.append(ReportSuspicions(findings.seen, to))
    return tuple(effects)


def _seen_dead(me: Member, view: View, evidence: Evidence, ids: Iterable[str]) -> tuple[Death, ...]:
    """The proven deaths of those among `ids` that are members on this host."""
    proven = (each for each in ids if each in view.ranks and each not in evidence.unreachable)
    here = (each for each in proven if view.members[view.ranks[each]].peer.host == me.peer.host)
    return tuple(Death(each, evidence.dead[each]) for each in here)
