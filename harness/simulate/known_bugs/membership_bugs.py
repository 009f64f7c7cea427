"""Bugs in the agreement on the members of a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from holdfast.ft.membership import state_machine
from holdfast.ft.membership.dissemination import Findings, announce_as_proposer
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
    Suspicion,
)
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.state_machine import Membership, NextMembers, Step
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Member, View
from holdfast.harness.simulate.known_bugs import KnownBug, bad_result, known_bug, replaced

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


@bad_result(
    "lost answer taken for failure",
    "the register's answer is lost, the proposer gives up and never asks again",
    "compare-and-set over a network",
    Membership,
    "_absorb",
)
def _never_retries(step: Step, before: Membership, event: Event, now: float) -> Step:
    return (replace(step[0], retry_at=FAR), step[1]) if isinstance(event, CasFailed) else step


@bad_result(
    "lost race is final",
    "whoever loses a race for an epoch believes that it is still proposing, and proposes no other",
    "ours, first draft",
    Membership,
    "_absorb",
)
def _race_is_final(step: Step, before: Membership, event: Event, now: float) -> Step:
    return (replace(step[0], in_flight=before.in_flight), step[1]) if isinstance(event, CasLost) else step


@bad_result(
    "install before agreement",
    "the proposer installs and announces its view before the register has taken it",
    "view-change classic",
    Membership,
    "_decide",
)
def _installs_first(step: Step, before: Membership, now: float) -> Step:
    state, effects = step
    for effect in effects:
        if isinstance(effect, Propose) and before.rank() is not None and effect.view.phase == "running":
            state, more = state._adopt(effect.view)
            return state, (*more, *announce_as_proposer(effect.view, state.me, state.spares, state.shape), *effects)
    return step


@bad_result(
    "spare promoted twice",
    "a spare that was taken stays in the list of spares, and takes a second rank",
    "hot-spare managers",
    Membership,
    "_adopt",
)
def _keeps_spares(step: Step, before: Membership, *_: object) -> Step:
    return replace(step[0], spares=before.spares), step[1]


@bad_result(
    "deaf to its eviction",
    "a process ignores views that it is not in, and goes on in the old epoch",
    "ULFM applications; torchft without a fenced quorum",
    Membership,
    "_adopt",
)
def _deaf_to_eviction(step: Step, before: Membership, *_: object) -> Step:
    return (before, ()) if step[0].ended == "evicted" else step


@bad_result(
    "evicted rank returns",
    "an evicted process announces itself as a spare, with the state that it had",
    "SWIM without incarnation numbers",
    Membership,
    "_adopt",
)
def _returns(step: Step, before: Membership, view: View | None, *_: object) -> Step:
    if step[0].ended != "evicted" or view is None or view.phase != "running":
        return step
    kept = tuple(effect for effect in step[1] if not isinstance(effect, Evicted))
    return replace(step[0], ended=""), (*kept, AnnounceSelf(view, view.members))


@bad_result(
    "stranded after a shrink",
    "the old communicator is not aborted when a new view is installed: ops in it never end",
    "NCCL shrink: survivors hang in the old communicator",
    Membership,
    "_adopt",
)
def _no_revoke(step: Step, *_: object) -> Step:
    return step[0], tuple(effect for effect in step[1] if not isinstance(effect, Revoke))


@bad_result(
    "rebuild in the wrong order",
    "the new epoch is installed before the old one is aborted, and the abort misses its target",
    "NCCL rebuild ordering",
    Membership,
    "_adopt",
)
def _install_before_revoke(step: Step, *_: object) -> Step:
    return step[0], tuple(sorted(step[1], key=lambda effect: isinstance(effect, Revoke)))


@bad_result(
    "group reused for a new quorum",
    "a view of as many members as before is taken for the same one, and the communicator kept",
    "torchft: quorum id not changed",
    Membership,
    "_adopt",
)
def _same_size_same_group(step: Step, before: Membership, view: View | None, *_: object) -> Step:
    (state, effects), old = step, before.view
    if old is None or view is None or state.view is not view or before.rank() is None or state.ended:
        return step
    if len(old.members) != len(view.members) or view.phase != "running":
        return step
    return state, tuple(effect for effect in effects if not isinstance(effect, Revoke | Install))


@bad_result(
    "one death at a time",
    "a death is not noted while another is being dealt with",
    "single-failure assumption",
    Membership,
    "_others",
)
def _one_at_a_time(found: tuple[Any, ...], state: Membership, deaths: object) -> tuple[Any, ...]:
    return () if state.evidence.dead else found[:1]


@bad_result(
    "proposer death",
    "only the first rank may propose, dead or alive",
    "view-change classic: no new leader",
    Membership,
    "_turn",
)
def _only_rank_zero(turn: float, state: Membership, view: View) -> float:
    return 0.0 if view.ranks[state.me.id] == 0 else FAR


@bad_result(
    "below the minimum for ever",
    "with too few members the job waits without a deadline",
    "torchft: min_replica_size never reached",
    Membership,
    "_proposal_while_running",
)
def _waits_for_ever(found: Any, *_: object) -> Any:
    return None if found is not None and found.why[0] == "short" else found


@bad_result(
    "revoked for nothing",
    "an epoch is revoked for a member that is heard again, and never followed by another",
    "ours, found by this simulator",
    Membership,
    "_revoke_after_losses",
)
def _revoked_for_ever(step: Step, *_: object) -> Step:
    return replace(step[0], revoked=0), step[1]


@bad_result(
    "minimum ignored",
    "the job goes on with fewer members than it can run with",
    "elastic launchers",
    state_machine,
    "next_size",
)
def _any_size_will_do(size: int, view: View, *_: object) -> int:
    return len(view.members)


def _sorted_by(next_up: NextMembers, key: Callable[[Member], Any]) -> NextMembers:
    return NextMembers(tuple(sorted(next_up.members, key=key)), next_up.reason)


@bad_result(
    "joiners first",
    "newcomers get the first ranks, everybody else another one",
    "NCCL grow: ranks out of order",
    state_machine,
    "successors",
)
def _newcomers_first(next_up: NextMembers, view: View, *_: object) -> NextMembers:
    return _sorted_by(next_up, lambda member: member.id in view.ranks)


@bad_result(
    "replacement comes last",
    "a spare does not take the dead rank's place: all after that move up",
    "ULFM shrink and spawn",
    state_machine,
    "successors",
)
def _newcomers_last(next_up: NextMembers, view: View, *_: object) -> NextMembers:
    return _sorted_by(next_up, lambda member: member.id not in view.ranks)


@bad_result(
    "ranks by address",
    "ranks are dealt out anew at each rebuild, by address",
    "elastic launchers",
    state_machine,
    "successors",
)
def _by_address(next_up: NextMembers, *_: object) -> NextMembers:
    return _sorted_by(next_up, lambda member: member.address[::-1])


# Evidence -------------------------------------------------------------------------------------------------------------


@known_bug(
    "death during a rebuild",
    "a new view wipes out all evidence, that of deaths which it does not know of too",
    "second failure during recovery",
    Evidence,
    "for_view",
)
def _forgets(after: Callable[..., Evidence]) -> object:
    return lambda self, view, departed, shape: Evidence()


@known_bug(
    "suspicion without refutation",
    "a suspicion is never taken back: those of different times add up",
    "SWIM before its suspicion mechanism",
    Evidence,
    "with_clearance",
)
def _never_cleared(cleared: Callable[..., Evidence]) -> object:
    return lambda self, said, view, shape: self


@known_bug(
    "one accuser is enough",
    "whoever is unheard by one observer is evicted, though all others hear it",
    "plain heartbeat detectors; what Rapid's H of K is against",
    Evidence,
    "_with_losses",
)
def _one_is_enough(judged: Callable[..., Evidence]) -> object:
    def _with_losses(self: Evidence, suspects: Iterable[str], view: View | None, shape: Shape) -> Evidence:
        failed = {who: "somebody suspects it" for who in suspects if self.suspected.get(who) and who not in self.lost}
        return dataclasses.replace(self, lost={**self.lost, **failed})

    return _with_losses


def _any_order(numbered: Callable[..., Any]) -> object:
    return lambda self, member, observer, word: numbered(self, member, observer, 0)


def _without_retractions(open_findings: Callable[..., Findings]) -> object:
    def broken(me: Member, view: View, evidence: Evidence) -> Findings:
        words = open_findings(me, view, evidence)
        return Findings(words.deaths, tuple(word for word in words.seen if isinstance(word, Suspicion)))

    return broken


@contextmanager
def _late_words() -> Iterator[None]:
    numbered, open_findings = Evidence.__dict__["_numbered"], state_machine.__dict__["open_findings"]
    with (
        replaced(Evidence, "_numbered", _any_order(numbered)),
        replaced(state_machine, "open_findings", _without_retractions(open_findings)),
    ):
        yield


late_word_counts = KnownBug(
    "late word counts",
    "a suspicion that arrives late takes the place of its own retraction, which is told only once",
    "ours, found by this simulator; SWIM without incarnation numbers",
    _late_words,
)
