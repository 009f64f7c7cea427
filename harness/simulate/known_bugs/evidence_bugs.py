"""Bugs in the evaluation of evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.ft.membership import state_machine
from holdfast.ft.membership.dissemination import Findings
from holdfast.ft.membership.events import Suspicion
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Member, View
from holdfast.harness.simulate.known_bugs.known_bug import KnownBug, known_bug, replaced


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
