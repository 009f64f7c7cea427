"""Bugs of a node: in committing steps, transferring the state, and what it does around the membership."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.ft import events, step_protocol
from holdfast.ft.detectors.heartbeat import HeartbeatDetector
from holdfast.ft.detectors.watch import Detectors
from holdfast.ft.membership.view import View
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.node import Node
from holdfast.ft.node.register import RegisterClient
from holdfast.ft.node.table_sharing import TableSharing
from holdfast.ft.step_protocol import HOLDER, NEWCOMER, Asks, CommitState, CommitStep, Decision, StepProtocol, Vote
from holdfast.harness.simulate.known_bugs import bad_result, known_bug

# Steps and the state --------------------------------------------------------------------------------------------------


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


@known_bug(
    "everybody gives up",
    "a rank whose epoch has ended raises an error instead of waiting for the next one",
    "jobs without a rebuild",
    StepProtocol,
    "_leave",
)
def _gives_up(leave: Callable[..., Asks[View]]) -> object:
    def broken(self: StepProtocol, epoch: int, failure: HoldfastError) -> Asks[View]:
        yield from ()
        raise OpTimeout("rebuild", epoch, 1.0)

    return broken


# Around the membership ------------------------------------------------------------------------------------------------


@known_bug(
    "detector lost without a stand-in",
    "a detector that raises is left out, and nothing takes its place",
    "ours, first draft",
    Detectors,
    "_lose",
)
def _without_stand_in(lose: Callable[..., None]) -> object:
    return lambda self, name, why, error=None: None


@known_bug(
    "answer waited for without end",
    "a proposal whose answer is lost is never given up",
    "missing deadline",
    RegisterClient,
    "propose",
)
def _waits_for_every_answer(propose: Callable[..., None]) -> object:
    def broken(self: RegisterClient, expected: int, view: View) -> None:
        propose(self, expected, view)
        if self._deadline is not None:
            self._deadline.cancel()

    return broken


@known_bug(
    "view installed twice",
    "a view that is announced in an op and then in a message begins its epoch twice",
    "at-least-once delivery",
    EpochGuard,
    "install",
)
def _installs_again(install: Callable[..., None]) -> object:
    def broken(self: EpochGuard, view: View) -> None:
        if self._view is not None and self._view.epoch == view.epoch:
            self._view = None
        install(self, view)

    return broken


@known_bug(
    "late connection tells nothing",
    "what was set before a connection stood, and could not be sent, is not sent over it",
    "messages dropped while connecting",
    TableSharing,
    "linked",
)
def _says_nothing_again(linked: Callable[..., None]) -> object:
    return lambda self, peer: None


@bad_result(
    "stopped by the view before",
    "evidence about the members of one view ends the epoch of the next",
    "ours, found by this simulator",
    Node,
    "_judges_another",
)
def _never(judges: bool, *_: object) -> bool:
    return False


@bad_result(
    "dead process confirmed",
    "a process that has ended is not stopped either, so its host confirms to the others that it lives",
    "ours, found by this simulator",
    HeartbeatDetector,
    "_lives",
)
def _always(lives: bool, *_: object) -> bool:
    return True
