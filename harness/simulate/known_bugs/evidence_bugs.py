"""Bugs in the evaluation of evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.ft.membership import state_machine
from holdfast.ft.membership.events import Suspicion
from holdfast.ft.membership.evidence import Evidence
from holdfast.ft.membership.evidence_reporting import Words
from holdfast.ft.membership.topology import Shape
from holdfast.ft.membership.view import Member, View
from holdfast.harness.simulate.known_bugs.known_bug import KnownBug, known_bug, replaced


def _forgets(after: Callable[..., Evidence]) -> object:
    return lambda self, view, departed, shape: Evidence()


def _never_cleared(cleared: Callable[..., Evidence]) -> object:
    return lambda self, said, view, shape: self


def _one_is_enough(judged: Callable[..., Evidence]) -> object:
    def _judged(self: Evidence, suspects: Iterable[str], view: View | None, shape: Shape) -> Evidence:
        condemned = {
            who: "somebody suspects it" for who in suspects if self.suspected.get(who) and who not in self.lost
        }
        return dataclasses.replace(self, lost={**self.lost, **condemned})

    return _judged


def _any_order(heard_out: Callable[..., Any]) -> object:
    return lambda self, member, observer, word: heard_out(self, member, observer, 0)


def _without_retractions(standing: Callable[..., Words]) -> object:
    def broken(me: Member, view: View, evidence: Evidence) -> Words:
        words = standing(me, view, evidence)
        return Words(words.deaths, tuple(word for word in words.seen if isinstance(word, Suspicion)))

    return broken


@contextmanager
def _late_words() -> Iterator[None]:
    heard_out, standing = Evidence.__dict__["_heard_out"], state_machine.__dict__["standing"]
    with (
        replaced(Evidence, "_heard_out", _any_order(heard_out)),
        replaced(state_machine, "standing", _without_retractions(standing)),
    ):
        yield


KNOWN_BUGS: tuple[KnownBug, ...] = (
    known_bug(
        "death during a rebuild",
        "a new view wipes out all evidence, that of deaths which it does not know of too",
        "second failure during recovery",
        Evidence,
        "after",
        _forgets,
    ),
    known_bug(
        "suspicion without refutation",
        "a suspicion is never taken back: those of different times add up",
        "SWIM before its suspicion mechanism",
        Evidence,
        "cleared",
        _never_cleared,
    ),
    known_bug(
        "one accuser is enough",
        "whoever is unheard by one observer is evicted, though all others hear it",
        "plain heartbeat detectors; what Rapid's H of K is against",
        Evidence,
        "_judged",
        _one_is_enough,
    ),
    KnownBug(
        "late word counts",
        "a suspicion that arrives late takes the place of its own retraction, which is told only once",
        "ours, found by this simulator; SWIM without incarnation numbers",
        _late_words,
    ),
)
