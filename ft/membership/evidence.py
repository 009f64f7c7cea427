"""What is known of who is gone and who is suspected by whom. Immutable; every change gives another one.

A death is a proof and stands alone. A suspicion is one observer's; a member is lost when most of its observers
suspect it (one outside of the view, a spare, when anybody does; one on the larger of two hosts never for that).
Observers that are dead have no say, nor those that are lost themselves and were silent about it: so the set of the lost
does not depend on the order in which evidence comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from holdfast.ft.membership.events import Cleared, Death, Suspicion
from holdfast.ft.membership.topology import Shape, can_be_condemned, observers
from holdfast.ft.membership.view import Member, View

_NONE: Mapping[str, str] = MappingProxyType({})
_NOBODY: Mapping[str, Mapping[str, str]] = MappingProxyType({})
_SILENT: Mapping[str, Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Evidence:
    """`dead`: id -> how that is known. `suspected`: id -> observer -> what it saw. `lost`: the dead, and those that
    most of their observers suspect: id -> evidence. `words`: member ->
    observer -> how often it has spoken of that member."""

    dead: Mapping[str, str] = field(default_factory=lambda: _NONE)
    suspected: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NOBODY)
    lost: Mapping[str, str] = field(default_factory=lambda: _NONE)
    words: Mapping[str, Mapping[str, int]] = field(default_factory=lambda: _SILENT)

    def __hash__(self) -> int:
        suspicions = frozenset((member, frozenset(seen.items())) for member, seen in self.suspected.items())
        words = frozenset((member, frozenset(said.items())) for member, said in self.words.items())
        return hash((frozenset(self.dead.items()), suspicions, words))

    def deaths_of(self, departed: tuple[Member, ...], view: View) -> tuple[Death, ...]:
        """How those ended who are not in `view` any more. Its reason says why if nothing else is known."""
        deaths = view.remember("deaths", departed, lambda: tuple(Death(m.id, view.reason) for m in departed))
        return tuple(Death(d.id, self.lost.get(d.id, d.evidence)) for d in deaths) if self.lost else deaths

    def in_doubt(self, view: View) -> bool:
        """Whether more losses are likely to show in a moment: somebody is suspected, but not yet by enough, or shares
        the host of one that is lost for silence.
        """
        if len(self.lost) == len(self.dead):
            return False
        if any(member not in self.lost for member in self.suspected):
            return True
        silent = (view.ranks[who] for who in self.lost if who not in self.dead and who in view.ranks)
        hosts = {view.members[rank].peer.host: None for rank in silent}
        return any(view.members[rank].id not in self.lost for host in hosts for rank in view.hosts[host])

    def buried(self, deaths: Iterable[Death], view: View | None, shape: Shape) -> Evidence:
        """With more dead. The same object if all were known."""
        new = {death.id: death.evidence for death in deaths if death.id not in self.dead}
        if not new:
            return self
        dead = {**self.dead, **new}
        if not self.suspected:
            return replace(self, dead=dead, lost=dead)
        return replace(self, dead=dead, lost=dead)._judged(list(self.suspected), view, shape)

    def suspecting(self, said: Suspicion, view: View | None, shape: Shape) -> Evidence:
        """With one more suspicion. The same object if its observer has said something later."""
        words = self._heard_out(said.member, said.observer, said.word)
        if words is None:
            return self
        against = {**self.suspected.get(said.member, {}), said.observer: said.evidence}
        more = replace(self, suspected={**self.suspected, said.member: against}, words=words)
        return more._judged([said.member], view, shape)

    def cleared(self, said: Cleared, view: View | None, shape: Shape) -> Evidence:
        """With a suspicion taken back. What rested on it falls."""
        words = self._heard_out(said.member, said.observer, said.word)
        if words is None:
            return self
        against = self.suspected.get(said.member, {})
        if said.observer not in against:
            return replace(self, words=words) if said.word else self
        suspected = dict(self.suspected)
        del suspected[said.member]
        left = {who: seen for who, seen in against.items() if who != said.observer}
        if left:
            suspected[said.member] = left
        fresh = replace(self, suspected=suspected, words=words)
        if said.member not in self.lost or said.member in self.dead:
            return fresh
        return replace(fresh, lost=self.dead)._judged(list(suspected), view, shape)

    def after(self, view: View, departed: Iterable[Member], shape: Shape) -> Evidence:
        """What still matters in `view`, which these left: suspicions of and by its members, and deaths of others."""
        if not self.dead and not self.words:
            return self
        gone = {member.id for member in departed}
        dead = {who: how for who, how in self.dead.items() if who not in gone}
        suspected = {}
        for who, against in self.suspected.items():
            if who in gone:
                continue
            left = {observer: seen for observer, seen in against.items() if observer in view.ranks}
            if left:
                suspected[who] = left
        words = {
            who: {observer: word for observer, word in said.items() if observer not in gone}
            for who, said in self.words.items()
            if who not in gone
        }
        return Evidence(dead, suspected, dead, words)._judged(list(suspected), view, shape)

    def _heard_out(self, member: str, observer: str, word: int) -> Mapping[str, Mapping[str, int]] | None:
        """How often everybody has spoken, with this word; None if it comes too late."""
        said = self.words.get(member, {})
        last = said.get(observer, 0)
        if word and word <= last:
            return None
        return {**self.words, member: {**said, observer: word or last + 1}}

    def _touched(self, ids: Iterable[str], view: View | None, shape: Shape) -> list[str]:
        """The suspects about whom these have a say."""
        if view is None:
            return []
        if shape.is_mesh(view):
            return list(self.suspected)
        near: dict[str, None] = {}
        for who in ids:
            rank = view.rank_of(who)
            if rank is not None:
                near.update(dict.fromkeys(m.id for m in observers(view, view.members[rank], shape)))
        return [who for who in near if who in self.suspected]

    def _judged(self, suspects: Iterable[str], view: View | None, shape: Shape) -> Evidence:
        """With everybody lost whom these suspicions, or the losses that follow from them, condemn."""
        if view is None:
            return self
        state = self
        todo = list(suspects)
        while todo:
            who = todo.pop(0)
            against = state.suspected.get(who, {})
            rank = view.rank_of(who)
            if who in state.lost or not against:
                continue
            if rank is None:
                state = replace(state, lost={**state.lost, who: against[min(against)]})
                continue
            if not can_be_condemned(view, view.members[rank]):
                continue
            jury = [
                m.id
                for m in observers(view, view.members[rank], shape)
                if m.id not in state.dead and (m.id not in state.lost or m.id in against)
            ]
            guilty = [observer for observer in jury if observer in against]
            if 2 * len(guilty) > len(jury):
                words = f"suspected by {len(guilty)} of {len(jury)} observers: {against[min(guilty)]}"
                state = replace(state, lost={**state.lost, who: words})
                todo += state._touched([who], view, shape)
        return state
