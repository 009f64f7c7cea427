"""Bugs in committing steps and in handing over the state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.ft.ledger import Ledger
from holdfast.ft.tenure import Tenure
from holdfast.ft.verdict import HOLDER, NEWCOMER, Verdict, Vote
from holdfast.harness.simulate import worker
from holdfast.harness.simulate.museum.exhibit import Exhibit, exhibit

Judge = Callable[[Sequence[Vote], int], Verdict]


def _prepared_by_any(judge: Judge) -> object:
    def broken(votes: Sequence[Vote], rank: int) -> Verdict:
        some = any(vote.prepared for vote in votes if vote.standing != NEWCOMER)
        return judge([dataclasses.replace(vote, prepared=vote.prepared or some) for vote in votes], rank)

    return broken


def _never_recovered(judge: Judge) -> object:
    def broken(votes: Sequence[Vote], rank: int) -> Verdict:
        newest = max(vote.done for vote in votes)
        return judge([dataclasses.replace(v, prepared=v.prepared and v.done < newest) for v in votes], rank)

    return broken


def _straggler_left(judge: Judge) -> object:
    def broken(votes: Sequence[Vote], rank: int) -> Verdict:
        verdict = judge(votes, rank)
        behind = votes[rank].done < max(vote.done for vote in votes)
        return dataclasses.replace(verdict, committed=verdict.committed and not behind)

    return broken


def _claims_to_hold(vote: Callable[[Ledger], Vote]) -> object:
    return lambda self: dataclasses.replace(vote(self), standing=HOLDER)


def _a_step_behind(take_over: Callable[[Ledger, int], None]) -> object:
    return lambda self, done: take_over(self, max(0, done - 1))


def _unfenced(held: Any) -> object:
    @contextlib.contextmanager
    def broken(self: Tenure, epoch: int) -> Iterator[None]:
        yield

    return broken


def _drops_open_step(finishes: Callable[[Ledger], bool]) -> object:
    return lambda self: False


EXHIBITS: tuple[Exhibit, ...] = (
    exhibit(
        "commit by a minority",
        "a step is committed if any survivor had prepared it, though others had not",
        "two-phase commit classic",
        worker,
        "judge",
        _prepared_by_any,
    ),
    exhibit(
        "commit lost",
        "a step that all survivors had prepared is done again, though one that died may have committed it",
        "two-phase commit classic",
        worker,
        "judge",
        _never_recovered,
    ),
    exhibit(
        "straggler left behind",
        "a survivor that missed the commit of a step does the step again, the others the next",
        "torchft: should_commit by those who arrive",
        worker,
        "judge",
        _straggler_left,
    ),
    exhibit(
        "newcomer claims the state",
        "a newcomer votes as if it held the state of the job",
        "torchft: healthy replicas chosen by step alone",
        Ledger,
        "vote",
        _claims_to_hold,
    ),
    exhibit(
        "newcomer a step behind",
        "the state is handed over with the number of the step before",
        "checkpoint off by one",
        Ledger,
        "take_over",
        _a_step_behind,
    ),
    exhibit(
        "commit in a revoked epoch",
        "a commit does not look whether its epoch still holds",
        "missing fence",
        Tenure,
        "held",
        _unfenced,
    ),
    exhibit(
        "last step dropped",
        "a rank that had prepared the last step when the job was finished does not commit it",
        "ours, first draft",
        Ledger,
        "finishes",
        _drops_open_step,
    ),
)
