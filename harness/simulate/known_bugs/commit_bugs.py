"""Bugs in committing steps and in transferring the state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.comms.errors import HoldfastError
from holdfast.ft import events, step_protocol
from holdfast.ft.membership.view import View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.step_protocol import HOLDER, NEWCOMER, Asks, CommitState, CommitStep, Decision, StepProtocol, Vote
from holdfast.harness.simulate.known_bugs.known_bug import bad_result, known_bug

Decide = Callable[[Sequence[Vote], int], Decision]


@known_bug(
    "commit by a minority",
    "a step is committed if any survivor had prepared it, though others had not",
    "two-phase commit classic",
    step_protocol,
    "decide",
)
def _prepared_by_any(decide: Decide) -> object:
    def broken(votes: Sequence[Vote], rank: int) -> Decision:
        some = any(vote.prepared for vote in votes if vote.standing != NEWCOMER)
        return decide([dataclasses.replace(vote, prepared=vote.prepared or some) for vote in votes], rank)

    return broken


@known_bug(
    "commit lost",
    "a step that all survivors had prepared is done again, though one that died may have committed it",
    "two-phase commit classic",
    step_protocol,
    "decide",
)
def _never_recovered(decide: Decide) -> object:
    def broken(votes: Sequence[Vote], rank: int) -> Decision:
        newest = max(vote.done for vote in votes)
        return decide([dataclasses.replace(v, prepared=v.prepared and v.done < newest) for v in votes], rank)

    return broken


@bad_result(
    "straggler left behind",
    "a survivor that missed the commit of a step does the step again, the others the next",
    "torchft: should_commit by those who arrive",
    step_protocol,
    "decide",
)
def _straggler_left(decision: Decision, votes: Sequence[Vote], rank: int) -> Decision:
    behind = votes[rank].done < max(vote.done for vote in votes)
    return dataclasses.replace(decision, committed=decision.committed and not behind)


@bad_result(
    "newcomer claims the state",
    "a newcomer votes as if it held the state of the job",
    "torchft: healthy replicas chosen by step alone",
    CommitState,
    "vote",
)
def _claims_to_hold(vote: Vote, state: CommitState) -> Vote:
    return dataclasses.replace(vote, standing=HOLDER)


@known_bug(
    "newcomer a step behind",
    "the state is handed over with the number of the step before",
    "checkpoint off by one",
    CommitState,
    "take_over",
)
def _a_step_behind(take_over: Callable[[CommitState, int], None]) -> object:
    return lambda self, done: take_over(self, max(0, done - 1))


@known_bug(
    "commit in a revoked epoch",
    "a commit does not look whether its epoch still holds",
    "missing fence",
    EpochGuard,
    "held",
)
def _unfenced(held: Any) -> object:
    @contextlib.contextmanager
    def broken(self: EpochGuard, epoch: int) -> Iterator[None]:
        yield

    return broken


@bad_result(
    "last step dropped",
    "a rank that had prepared the last step when the job was finished does not commit it",
    "ours, first draft",
    CommitState,
    "finishes",
)
def _drops_open_step(finishes: bool, state: CommitState) -> bool:
    return False


@known_bug(
    "commit by those believed alive",
    "a rank with its results commits when it finds others dead, and waits neither for the register nor for votes",
    "fault-tolerant expert parallelism: each rank masks, and goes on",
    StepProtocol,
    "_leave",
)
def _commits_what_it_has(leave: Callable[..., Asks[View]]) -> object:
    def broken(self: StepProtocol, epoch: int, failure: HoldfastError) -> Asks[View]:
        commits = self._commits
        if self._is_open and self._has_results:
            yield CommitStep(events.StepCommitted(step=commits.done, epoch=epoch, how="recovered"))
            commits.commit()
            self._is_open = False
        return (yield from leave(self, epoch, failure))

    return broken
