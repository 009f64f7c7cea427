"""What a member tells the others of what it has seen itself, and whom: pure functions.

In a small job it tells everybody who may not see it. In a large one it tells the heads, and if nothing comes of that
those after them: so the load of a member does not grow with the size of the job.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from holdfast.ft.membership.effects import Effect, ReportDeaths, ReportSuspicions
from holdfast.ft.membership.events import Cleared, Death, Event, ProvenDeaths, SpareGone, Suspicion
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.topology import Shape, heads
from holdfast.ft.membership.view import Member, View


def left_to_another(view: View | None, me: Member, lost: Container[str]) -> bool:
    """Whether another member of this host is first to propose what follows from the loss of `lost`: it sees them end
    as soon as this process does, and processors are few while all recover.
    """
    if view is None or view.phase != "running" or view.rank_of(me.id) is None:
        return False
    first = next((member for member in view.members if member.id not in lost), me)
    return first.id != me.id and first.peer.host == me.peer.host


@dataclass(frozen=True, slots=True)
class Words:
    """What `me` has to say: deaths on its own host, and whom it hears of other hosts and whom not any more."""

    deaths: tuple[Death, ...]
    seen: tuple[Suspicion | Cleared, ...]


def news(event: Event, me: Member, view: View, evidence: Evidence, before: Evidence) -> Words:
    """What `event` has made of what this process has seen: `evidence`, and `before` it."""
    deaths: tuple[Death, ...] = ()
    seen: tuple[Suspicion | Cleared, ...] = ()
    match event:
        case ProvenDeaths() | SpareGone():
            told = [death.id for death in event.deaths] if isinstance(event, ProvenDeaths) else [event.member]
            new = (who for who in dict.fromkeys(told) if who in evidence.dead and who not in before.dead)
            deaths = _seen_dead(me, view, evidence, new)
        case Suspicion(who, me.id) | Cleared(who, me.id) if who in view.ranks:
            doubted = me.id in evidence.suspected.get(who, {})
            if doubted != (me.id in before.suspected.get(who, {})) and (doubted or who not in evidence.dead):
                seen = (_suspicion(me, evidence, who) if doubted else _clearance(me, evidence, who),)
    return Words(deaths, seen)


def standing(me: Member, view: View, evidence: Evidence) -> Words:
    """All that has to be said for as long as nothing comes of it; what was taken back is said again too."""
    seen: list[Suspicion | Cleared] = []
    for who, said in evidence.words.items():
        if me.id in said and who not in evidence.dead and who in view.ranks:
            doubted = me.id in evidence.suspected.get(who, {})
            seen.append(_suspicion(me, evidence, who) if doubted else _clearance(me, evidence, who))
    return Words(_seen_dead(me, view, evidence, evidence.dead), tuple(seen))


def urgent(words: Words) -> bool:
    """Whether something must come of it: good news alone need not be told for ever."""
    return bool(words.deaths) or any(isinstance(word, Suspicion) for word in words.seen)


def _suspicion(me: Member, evidence: Evidence, who: str) -> Suspicion:
    return Suspicion(who, me.id, evidence.suspected[who][me.id], evidence.words[who][me.id])


def _clearance(me: Member, evidence: Evidence, who: str) -> Cleared:
    return Cleared(who, me.id, evidence.words[who][me.id])


def addressed(
    words: Words, me: Member, view: View, spares: tuple[Member, ...], evidence: Evidence, shape: Shape, turn: int
) -> tuple[Effect, ...]:
    """What to do in order to tell `words`, for the `turn`-th time."""
    if shape.is_mesh(view):
        everybody = [m for m in (*view.members, *spares) if m.id != me.id]
    else:
        doubtful = {word.member for word in words.seen} | evidence.lost.keys()
        everybody = [m for m in heads(view, doubtful, shape, turn) if m.id != me.id]
    to = tuple(m for m in everybody if m.id not in evidence.dead)
    blind = tuple(m for m in to if m.peer.host != me.peer.host)
    effects: list[Effect] = []
    if words.deaths and blind:
        effects.append(ReportDeaths(words.deaths, blind))
    if words.seen and to:  # whom it is about too: where one way alone is cut, they learn that this side has stopped
        effects.append(ReportSuspicions(words.seen, to))
    return tuple(effects)


def _seen_dead(me: Member, view: View, evidence: Evidence, ids: Iterable[str]) -> tuple[Death, ...]:
    """Those of the dead that are members, and of this host."""
    here = (who for who in ids if who in view.ranks and view.members[view.ranks[who]].peer.host == me.peer.host)
    return tuple(Death(who, evidence.dead[who]) for who in here)
