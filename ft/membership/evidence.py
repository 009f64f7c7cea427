"""The evidence of one process: which processes are dead, and which observer suspects which member.

A death is certain and counts alone. A suspicion is the statement of one observer; a member is lost when most of its
observers suspect it. In a large job these are few: there they must be on most of their hosts too, or a host that is cut
off, and has most of a member's observers, would find that member lost. A process outside of the view (a spare) is lost
when any observer suspects it; a member on the larger of two hosts is never lost by suspicions. Dead observers do not
count, nor do lost ones that have not suspected the member: so the set of the lost does not depend on the order in which
evidence arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from holdfast.ft.membership.events import Cleared, Death, Suspicion, Unreachable
from holdfast.ft.membership.topology import Shape, can_fail_by_suspicion, observers
from holdfast.ft.membership.view import Member, View

_NONE: Mapping[str, str] = MappingProxyType({})
_NO_SUSPICIONS: Mapping[str, Mapping[str, str]] = MappingProxyType({})
_NO_STATEMENTS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Evidence:
    """Immutable; every change returns another object."""

    dead: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """id -> the evidence that it counts as dead for certain."""
    suspected: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NO_SUSPICIONS)
    """member -> observer -> what the observer saw."""
    lost: Mapping[str, str] = field(default_factory=lambda: _NONE)
    """id -> evidence: the dead, and those that most of their observers suspect. Follows from the other fields."""
    statements: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: _NO_STATEMENTS)
    """member -> observer -> the number of its last statement, so that a late message replaces no newer one."""
    unreachable: frozenset[str] = frozenset()
    """Those of `dead` without a proof of death: this process concluded from suspicions that the job goes on without.
    A proof replaces that later."""

    def __hash__(self) -> int:
        suspicions = frozenset((member, frozenset(seen.items())) for member, seen in self.suspected.items())
        words = frozenset((member, frozenset(said.items())) for member, said in self.statements.items())
        return hash((frozenset(self.dead.items()), suspicions, words))

    def deaths_of(self, departed: tuple[Member, ...], view: View) -> tuple[Death, ...]:
        """The deaths of the members that left with `view`; its reason is the evidence where no other is known."""
        deaths = view.remember("deaths", departed, lambda: tuple(Death(m.id, view.reason) for m in departed))
        return tuple(Death(d.id, self.lost.get(d.id, d.evidence)) for d in deaths) if self.lost else deaths

    def proves(self, view: View) -> bool:
        """Whether each lost member of `view` has certainly ended or left: none lives on, cut off."""
        proven = self.dead.keys() - self.unreachable
        return all(each in proven for each in self.lost if each in view.ranks)

    def more_losses_likely(self, view: View) -> bool:
        """Whether more losses are likely to follow soon.

        That is so if a member is suspected by too few observers yet, or shares the host of a member that was lost by
        suspicions.
        """
        if len(self.lost) == len(self.dead):
            return False
        if any(member not in self.lost for member in self.suspected):
            return True
        silent = (view.ranks[each] for each in self.lost if each not in self.dead and each in view.ranks)
        hosts = {view.members[rank].peer.host: None for rank in silent}
        return any(view.members[rank].id not in self.lost for host in hosts for rank in view.hosts[host])

    def with_deaths(self, deaths: Iterable[Death], view: View | None, shape: Shape) -> Evidence:
        """Add deaths. Returns the same object if all were known."""
        proven = self.dead.keys() - self.unreachable
        new = {death.id: death.evidence for death in deaths if death.id not in proven}
        if not new:
            return self
        return self._with_dead(new, self.unreachable - new.keys(), view, shape)

    def with_unreachable(self, concluded: Unreachable, view: View | None, shape: Shape) -> Evidence:
        """Add a conclusion from suspicions. Returns the same object if the member is lost for certain already."""
        if concluded.member in self.dead:
            return self
        return self._with_dead(
            {concluded.member: concluded.evidence}, self.unreachable | {concluded.member}, view, shape
        )

    def _with_dead(
        self, new: Mapping[str, str], unreachable: frozenset[str], view: View | None, shape: Shape
    ) -> Evidence:
        dead = {**self.dead, **new}
        state = replace(self, dead=dead, lost=dead, unreachable=unreachable)
        return state._with_losses(list(self.suspected), view, shape) if self.suspected else state

    def with_suspicion(self, said: Suspicion, view: View | None, shape: Shape) -> Evidence:
        """Add a suspicion. Returns the same object if its observer has made a later statement."""
        statements = self._numbered(said.member, said.observer, said.number)
        if statements is None:
            return self
        against = {**self.suspected.get(said.member, {}), said.observer: said.evidence}
        more = replace(self, suspected={**self.suspected, said.member: against}, statements=statements)
        return more._with_losses([said.member], view, shape)

    def with_clearance(self, said: Cleared, view: View | None, shape: Shape) -> Evidence:
        """Remove a suspicion, and the losses that it caused."""
        statements = self._numbered(said.member, said.observer, said.number)
        if statements is None:
            return self
        against = self.suspected.get(said.member, {})
        if said.observer not in against:
            return replace(self, statements=statements) if said.number else self
        suspected = dict(self.suspected)
        del suspected[said.member]
        left = {member_id: seen for member_id, seen in against.items() if member_id != said.observer}
        if left:
            suspected[said.member] = left
        fresh = replace(self, suspected=suspected, statements=statements)
        if said.member not in self.lost or said.member in self.dead:
            return fresh
        # losses may rest on this one, so all but the dead are concluded anew
        return replace(fresh, lost=self.dead)._with_losses(list(suspected), view, shape)

    def for_view(self, view: View, departed: Iterable[Member], shape: Shape) -> Evidence:
        """Keep what still matters in `view`: suspicions of and by its members, and deaths of processes that did not
        leave.
        """
        if not self.dead and not self.statements:
            return self
        gone = {member.id for member in departed}
        dead = {member_id: how for member_id, how in self.dead.items() if member_id not in gone}
        suspected = {}
        for member_id, against in self.suspected.items():
            if member_id in gone:
                continue
            left = {observer: seen for observer, seen in against.items() if observer in view.ranks}
            if left:
                suspected[member_id] = left
        words = {
            member_id: {observer: word for observer, word in said.items() if observer not in gone}
            for member_id, said in self.statements.items()
            if member_id not in gone
        }
        return Evidence(dead, suspected, dead, words, self.unreachable & dead.keys())._with_losses(
            list(suspected), view, shape
        )

    def _numbered(self, member: str, observer: str, number: int) -> Mapping[str, Mapping[str, int]] | None:
        """The statement counts with this statement added; None if a later one is known."""
        said = self.statements.get(member, {})
        last = said.get(observer, 0)
        if number and number <= last:
            return None
        return {**self.statements, member: {**said, observer: number or last + 1}}

    def _affected_suspects(self, ids: Iterable[str], view: View, shape: Shape) -> list[str]:
        """The suspects that have one of `ids` among their observers."""
        if shape.is_mesh(view):
            return list(self.suspected)
        near: dict[str, None] = {}
        for member_id in ids:
            rank = view.rank_of(member_id)
            if rank is not None:
                near.update(dict.fromkeys(m.id for m in observers(view, view.members[rank], shape)))
        return [member_id for member_id in near if member_id in self.suspected]

    def _with_losses(self, suspects: Iterable[str], view: View | None, shape: Shape) -> Evidence:
        """Add as lost each suspect that most of its observers suspect; losses that follow from these count too."""
        if view is None:
            return self
        state = self
        todo = list(suspects)
        while todo:
            member_id = todo.pop(0)
            against = state.suspected.get(member_id, {})
            rank = view.rank_of(member_id)
            if member_id in state.lost or not against:
                continue
            if rank is None:  # a spare: one suspicion is enough, since nothing is lost with it
                state = replace(state, lost={**state.lost, member_id: against[min(against)]})
                continue
            if not can_fail_by_suspicion(view, view.members[rank]):
                continue
            living = {
                m.id: m.peer.host
                for m in observers(view, view.members[rank], shape)
                # a lost observer that suspects still counts, so that the order of evidence does not matter
                if m.id not in state.dead and (m.id not in state.lost or m.id in against)
            }
            suspecting = [observer for observer in living if observer in against]
            spread = 2 * len({living[each] for each in suspecting}) > len({*living.values()})
            if 2 * len(suspecting) > len(living) and (spread or shape.is_mesh(view)):
                words = f"suspected by {len(suspecting)} of {len(living)} observers: {against[min(suspecting)]}"
                state = replace(state, lost={**state.lost, member_id: words})
                # with one observer fewer, those that it has not suspected may have a majority against them now
                todo += state._affected_suspects([member_id], view, shape)
        return state
