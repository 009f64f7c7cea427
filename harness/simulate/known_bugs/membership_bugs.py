"""Bugs in the agreement on the members of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast.ft.membership import state_machine
from holdfast.ft.membership.dissemination import announce_as_proposer
from holdfast.ft.membership.events import (
    AnnounceSelf,
    CasFailed,
    CasLost,
    CasWon,
    Event,
    Evicted,
    Install,
    Propose,
    Revoke,
)
from holdfast.ft.membership.next_view import NextMembers
from holdfast.ft.membership.state_machine import Membership, Step
from holdfast.ft.membership.view import Member, View
from holdfast.harness.simulate.known_bugs.known_bug import known_bug

Adopt = Callable[..., Step]
FAR = 1e9


@known_bug(
    "stale announcement",
    "a view is taken over because it is announced, though it is older than the one in use",
    "view-change classic",
    Membership,
    "_adopt",
)
def _adopts_older(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        if view is not None and self.view is not None and view.epoch < self.view.epoch:
            return adopt(replace(self, view=None), view, teller)
        return adopt(self, view, teller)

    return _adopt


@known_bug(
    "lost answer taken for success",
    "the register's answer is lost, and the proposal is taken for agreed on",
    "compare-and-set over a network",
    Membership,
    "_absorb",
)
def _unknown_is_won(absorb: Callable[..., Step]) -> object:
    def _absorb(self: Membership, event: Event, now: float) -> Step:
        if isinstance(event, CasFailed) and self.in_flight is not None:
            event = CasWon(self.in_flight)
        return absorb(self, event, now)

    return _absorb


@known_bug(
    "lost answer taken for failure",
    "the register's answer is lost, the proposer gives up and never asks again",
    "compare-and-set over a network",
    Membership,
    "_absorb",
)
def _never_retries(absorb: Callable[..., Step]) -> object:
    def _absorb(self: Membership, event: Event, now: float) -> Step:
        state, effects = absorb(self, event, now)
        return (replace(state, retry_at=FAR), effects) if isinstance(event, CasFailed) else (state, effects)

    return _absorb


@known_bug(
    "lost race is final",
    "whoever loses a race for an epoch believes that it is still proposing, and proposes no other",
    "ours, first draft",
    Membership,
    "_absorb",
)
def _race_is_final(absorb: Callable[..., Step]) -> object:
    def _absorb(self: Membership, event: Event, now: float) -> Step:
        state, effects = absorb(self, event, now)
        return (replace(state, in_flight=self.in_flight), effects) if isinstance(event, CasLost) else (state, effects)

    return _absorb


@known_bug(
    "install before agreement",
    "the proposer installs and announces its view before the register has taken it",
    "view-change classic",
    Membership,
    "_decide",
)
def _installs_first(decide: Callable[..., Step]) -> object:
    def _decide(self: Membership, now: float) -> Step:
        state, effects = decide(self, now)
        for effect in effects:
            if isinstance(effect, Propose) and self.rank() is not None and effect.view.phase == "running":
                state, more = state._adopt(effect.view)
                return state, (*more, *announce_as_proposer(effect.view, state.me, state.spares, state.shape), *effects)
        return state, effects

    return _decide


@known_bug(
    "spare promoted twice",
    "a spare that was taken stays in the list of spares, and takes a second rank",
    "hot-spare managers",
    Membership,
    "_adopt",
)
def _keeps_spares(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        return replace(state, spares=self.spares), effects

    return _adopt


@known_bug(
    "deaf to its eviction",
    "a process ignores views that it is not in, and goes on in the old epoch",
    "ULFM applications; torchft without a fenced quorum",
    Membership,
    "_adopt",
)
def _deaf_to_eviction(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        return (self, ()) if state.ended == "evicted" else (state, effects)

    return _adopt


@known_bug(
    "evicted rank returns",
    "an evicted process announces itself as a spare, with the state that it had",
    "SWIM without incarnation numbers",
    Membership,
    "_adopt",
)
def _returns(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        if state.ended != "evicted" or view is None or view.phase != "running":
            return state, effects
        kept = tuple(effect for effect in effects if not isinstance(effect, Evicted))
        return replace(state, ended=""), (*kept, AnnounceSelf(view, view.members))

    return _adopt


@known_bug(
    "stranded after a shrink",
    "the old communicator is not aborted when a new view is installed: ops in it never end",
    "NCCL shrink: survivors hang in the old communicator",
    Membership,
    "_adopt",
)
def _no_revoke(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        return state, tuple(effect for effect in effects if not isinstance(effect, Revoke))

    return _adopt


@known_bug(
    "rebuild in the wrong order",
    "the new epoch is installed before the old one is aborted, and the abort misses its target",
    "NCCL rebuild ordering",
    Membership,
    "_adopt",
)
def _install_before_revoke(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        return state, tuple(sorted(effects, key=lambda effect: isinstance(effect, Revoke)))

    return _adopt


@known_bug(
    "group reused for a new quorum",
    "a view of as many members as before is taken for the same one, and the communicator kept",
    "torchft: quorum id not changed",
    Membership,
    "_adopt",
)
def _same_size_same_group(adopt: Adopt) -> object:
    def _adopt(self: Membership, view: View | None, teller: str = "") -> Step:
        state, effects = adopt(self, view, teller)
        old = self.view
        if old is None or view is None or state.view is not view or self.rank() is None or state.ended:
            return state, effects
        if len(old.members) != len(view.members) or view.phase != "running":
            return state, effects
        return state, tuple(effect for effect in effects if not isinstance(effect, Revoke | Install))

    return _adopt


@known_bug(
    "one death at a time",
    "a death is not noted while another is being dealt with",
    "single-failure assumption",
    Membership,
    "_others",
)
def _one_at_a_time(others: Callable[..., tuple[Any, ...]]) -> object:
    return lambda self, deaths: () if self.evidence.dead else others(self, deaths)[:1]


@known_bug(
    "proposer death",
    "only the first rank may propose, dead or alive",
    "view-change classic: no new leader",
    Membership,
    "_turn",
)
def _only_rank_zero(turn: Callable[..., float]) -> object:
    return lambda self, view: 0.0 if view.ranks[self.me.id] == 0 else FAR


@known_bug(
    "below the minimum for ever",
    "with too few members the job waits without a deadline",
    "torchft: min_replica_size never reached",
    Membership,
    "_proposal_while_running",
)
def _waits_for_ever(need: Callable[..., Any]) -> object:
    def _next_proposal(self: Membership, view: View) -> Any:
        found = need(self, view)
        return None if found is not None and found.why[0] == "short" else found

    return _next_proposal


@known_bug(
    "revoked for nothing",
    "an epoch is revoked for a member that is heard again, and never followed by another",
    "ours, found by this simulator",
    Membership,
    "_revoke_after_losses",
)
def _revoked_for_ever(revoking: Callable[..., Step]) -> object:
    def _revoke_after_losses(self: Membership, before: Membership) -> Step:
        state, effects = revoking(self, before)
        return replace(state, revoked=0), effects

    return _revoke_after_losses


@known_bug(
    "minimum ignored",
    "the job goes on with fewer members than it can run with",
    "elastic launchers",
    state_machine,
    "next_size",
)
def _any_size_will_do(next_size: Callable[..., int]) -> object:
    return lambda view, lost, waiting: len(view.members)


def _sorted_by(key: Callable[[View, Member], Any], successors: Callable[..., NextMembers]) -> object:
    def broken(view: View, gone: Any, spares: Any) -> NextMembers:
        next_up = successors(view, gone, spares)
        return NextMembers(tuple(sorted(next_up.members, key=lambda member: key(view, member))), next_up.reason)

    return broken


@known_bug(
    "joiners first",
    "newcomers get the first ranks, everybody else another one",
    "NCCL grow: ranks out of order",
    state_machine,
    "successors",
)
def _newcomers_first(successors: Callable[..., NextMembers]) -> object:
    return _sorted_by(lambda view, member: member.id in view.ranks, successors)


@known_bug(
    "replacement comes last",
    "a spare does not take the dead rank's place: all after that move up",
    "ULFM shrink and spawn",
    state_machine,
    "successors",
)
def _newcomers_last(successors: Callable[..., NextMembers]) -> object:
    return _sorted_by(lambda view, member: member.id not in view.ranks, successors)


@known_bug(
    "ranks by address",
    "ranks are dealt out anew at each rebuild, by address",
    "elastic launchers",
    state_machine,
    "successors",
)
def _by_address(successors: Callable[..., NextMembers]) -> object:
    return _sorted_by(lambda view, member: member.address[::-1], successors)
