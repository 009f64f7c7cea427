"""The protocol of steps, as a generator without I/O: it yields requests, and gets their results, or errors thrown in.

`Session` carries the requests out on communicators; the simulator does in virtual time. In order: join the job; in each
epoch connect, vote on the step that the last one left open, and transfer state; then do steps. An error of `FAILURES`
leads to the next epoch, from anywhere; any other one ends the steps.

A step is PREPARED on a rank once the rank holds all its results and enters the commit barrier, and COMMITTED once the
rank has left the barrier. So if one rank committed, all had prepared. If all ranks that hold the state had prepared,
they can commit without anything from the dead. Otherwise no rank has committed, and the step is done again.

In a degraded view (`View.degraded_from`) the members build no communicator. A rank that holds its results prepares the
step in that view, and the votes travel over the rendezvous table, of which the dead have no part. It is the same
decision on the same votes: the register has the view, so a rank that was left out commits nothing that the living undo.
If the step cannot be committed, a newcomer lacks the state, or a checkpoint was not restored everywhere, the members
rebuild at once, and so none does a step twice over one communicator.

A job that returns to a checkpoint repeats the steps after it. If an epoch fails just then, perhaps only some ranks
have returned; the state of a rank that returned less often than others is obsolete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import msgspec

from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked
from holdfast.ft import events
from holdfast.ft.membership.view import Timeouts, View

FAILURES = (PeerFailed, Revoked, OpTimeout)
"""The errors that the death of a peer can cause inside an attempt."""

EVIDENT_SECONDS = 0.002
"""Seconds to wait, after an op failed, for the next epoch or for a better reason from the other members."""


# The decision on an open step ---------------------------------------------------------------------------------------

NEWCOMER, FOUNDER, HOLDER = 0, 1, 2
"""A rank's standing: it has no state; the state that it was constructed with, at the start; the state of the job."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank knows: `done` of `total` steps are committed, and step number `done` is `prepared` or not.

    `standing` is NEWCOMER, FOUNDER or HOLDER; `rewinds` is the number of returns to a checkpoint that the rank saw.
    """

    standing: int
    done: int
    prepared: bool
    total: int
    rewinds: int = 0

    def numbers(self) -> list[int]:
        return [self.standing, self.done, 2 * self.rewinds + self.prepared, self.total]

    @staticmethod
    def of(numbers: Sequence[int]) -> Vote:
        standing, done, word, total = numbers
        return Vote(standing, done, bool(word % 2), total, word // 2)


FIELDS = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome: whether the step that this rank had open is `committed`, and how the state gets to all ranks.

    `done` steps are committed on all ranks that hold the state, after `rewinds` returns to a checkpoint. Rank `source`
    has the state that the ranks `receivers` need; there may be none."""

    committed: bool
    done: int
    source: int
    receivers: tuple[int, ...]
    rewinds: int


def decide(votes: Sequence[Vote], rank: int) -> Decision:
    """The decision for `rank`; all ranks decide the same about the step.

    Raises `Mismatch` if this rank, or a rank that holds the state, is not doing the same job as the first rank that
    holds it; `HoldfastError` if no rank holds the state any more.
    """
    best, rewinds = max((vote.standing, vote.rewinds) for vote in votes)
    if best == NEWCOMER:
        raise HoldfastError(
            "no process that is left holds the state of the job: everybody who had it died; "
            "start the job again from its last checkpoint"
        )
    holders = [r for r, vote in enumerate(votes) if (vote.standing, vote.rewinds) == (best, rewinds)]
    for r in (*holders, rank):
        if votes[r].total != votes[holders[0]].total:
            raise Mismatch(
                f"rank {r} was asked for {votes[r].total} steps, rank {holders[0]} for {votes[holders[0]].total}; "
                "call steps() alike on all ranks"
            )
    newest = max(votes[r].done for r in holders)
    for r in holders:
        if not (votes[r].done == newest or (votes[r].done == newest - 1 and votes[r].prepared)):
            raise Mismatch(
                f"rank {r} has {votes[r].done} steps, others {newest}, and it was not about to commit the next: "
                "the state of the ranks has come apart; start the job again from its last checkpoint"
            )
    commit_newest = all(votes[r].done == newest and votes[r].prepared for r in holders)
    mine = votes[rank]
    committed = rank in holders and (commit_newest or mine.done < newest)
    source = holders[0]
    have = holders if best == HOLDER else [source]
    receivers = tuple(r for r in range(len(votes)) if r not in have)
    return Decision(committed, newest + int(commit_newest), source, receivers, rewinds)


# What one process has committed -------------------------------------------------------------------------------------

BROKEN_EPOCHS = 3
"""The number of epochs, between two commits, that failures without a known cause may end."""


class CommitState:
    """The steps of one process: `done` of `total` are committed, and step number `done` is `prepared` or not.

    `standing` is NEWCOMER, FOUNDER or HOLDER: what this process has of the job's state. `pending` is the decision by
    which newcomers still have to get the state; None if none has to. `rewinds` counts returns to a checkpoint.
    """

    def __init__(self) -> None:
        self.standing = NEWCOMER
        self.done = 0
        self.total = -1
        self.prepared = False
        self.rewinds = 0
        self.pending: Decision | None = None
        self._broken = 0

    def found(self) -> None:
        """Note that this process starts the job: it has the state that it was constructed with."""
        self.standing = FOUNDER

    def prepare(self) -> None:
        """Note that this rank holds all results of the open step."""
        self.prepared = True

    def commit(self) -> None:
        """Note that the open step is committed."""
        self.done += 1
        self.prepared = False
        self._broken = 0

    def may_break(self) -> bool:
        """Count one more epoch that a failure without a known cause ends; return whether it may."""
        self._broken += 1
        return self._broken <= BROKEN_EPOCHS

    def vote(self) -> Vote:
        """The vote of this process, for the ranks of the next epoch."""
        return Vote(self.standing, self.done, self.prepared, self.total, self.rewinds)

    def settle(self, decision: Decision) -> None:
        """Close the open step by `decision`. If the decision commits the step, call `commit` first."""
        self.prepared = False
        self.pending = decision if decision.receivers else None
        if self.standing == FOUNDER and not decision.receivers:
            self.standing = HOLDER
        elif self.standing == FOUNDER and decision.done:  # its own state is no longer the job's
            self.standing = NEWCOMER

    def take_over(self, done: int) -> None:
        """Note that this newcomer has got the state after `done` steps."""
        if self.pending is not None:
            self.rewinds = self.pending.rewinds
        self.done = done
        self.synchronised()

    def go_back(self, done: int) -> None:
        """Return to the state after `done` steps, which a checkpoint had."""
        self.done, self.prepared = done, False
        self.rewinds += 1

    def synchronised(self) -> None:
        """Note that the transfer of the state is over: all ranks hold it."""
        self.standing = HOLDER
        self.pending = None

    def finishes(self) -> bool:
        """Whether the end of the job commits an open step. Raises `HoldfastError` if steps are missing here."""
        open_step = self.prepared and self.done == self.total - 1
        if self.standing == NEWCOMER:
            raise HoldfastError("the job was finished before this process, a newcomer to it, was given its state")
        if self.done + open_step < self.total:
            raise HoldfastError(
                f"the job was finished after {self.done} of {self.total} steps here; call steps() alike on all ranks"
            )
        return open_step


# Requests: how the epochs follow each other -----------------------------------------------------------------------


class ProtocolRequest(msgspec.Struct, frozen=True):
    """What the protocol needs next."""


class Now(ProtocolRequest, frozen=True):
    """The time on this process's clock, in seconds."""


class Reach(ProtocolRequest, frozen=True):
    """A fault point is reached, in the epoch of `view` (None: the current one)."""

    point: str
    view: View | None = None


class RecordStep(ProtocolRequest, frozen=True):
    """Emit an event. With `in_epoch`, hold that epoch meanwhile: raises the error that ended it."""

    event: events.Event
    in_epoch: int | None = None


class JoinJob(ProtocolRequest, frozen=True):
    """Wait for the first view that has this process. Gets the view, and whether the process was a spare."""


class AwaitView(ProtocolRequest, frozen=True):
    """Wait for a view newer than `newer_than`, which `failure` ended. Raises OpTimeout, or what ends the session."""

    newer_than: int
    failure: HoldfastError | None = None


class LeaveEpoch(ProtocolRequest, frozen=True):
    """An op has failed: adopt a view that was announced with it. Gets the failure, in ranks of the epoch."""

    failure: HoldfastError


class AwaitEnd(ProtocolRequest, frozen=True):
    """Wait until the epoch is over, for at most `seconds`. Gets whether it is."""

    epoch: int
    seconds: float


class ReportFailure(ProtocolRequest, frozen=True):
    """No member has ended the epoch yet: report the failure as evidence about other members."""

    failure: HoldfastError


class BreakEpoch(ProtocolRequest, frozen=True):
    """No member was found to be dead: ask for another epoch because of `failure`."""

    epoch: int
    failure: HoldfastError


class Connect(ProtocolRequest, frozen=True):
    """Connect the members of `view`, this process as `rank`, and exchange votes. Gets all votes. Raises FAILURES."""

    view: View
    rank: int
    vote: Vote


class CollectVotes(ProtocolRequest, frozen=True):
    """Exchange votes with the members of the degraded `view`, under a name for this vote. Gets all. Raises FAILURES."""

    view: View
    name: str
    vote: Vote


class ProposeFinish(ProtocolRequest, frozen=True):
    """All steps are committed here: propose that the job is finished."""

    epoch: int


# Requests: state --------------------------------------------------------------------------------------------------


class TransferState(ProtocolRequest, frozen=True):
    """Send the state after `done` steps to newcomers, or receive it; collective. Raises FAILURES.

    Gets the number of steps done in the received state, on a newcomer; None on the others. `founding`: the job starts.
    """

    decision: Decision
    done: int
    founding: bool


class ConfirmTransfer(ProtocolRequest, frozen=True):
    """This newcomer has noted its state: let the other ranks continue. Collective. Raises FAILURES."""


class RestoreState(ProtocolRequest, frozen=True):
    """Restore sharded state for a new epoch; collective. Gets the number of steps done in it. Raises FAILURES."""

    done: int


class StageState(ProtocolRequest, frozen=True):
    """Keep the state after `version` steps beside the current one, here and on neighbours. Raises FAILURES."""

    version: int


# Requests: steps --------------------------------------------------------------------------------------------------


class StepBoundary(ProtocolRequest, frozen=True):
    """`done` steps are committed: write a checkpoint if one is due; collective. Raises FAILURES.

    True if one is due in a degraded epoch, which therefore ends.
    """

    done: int


class RunBody(ProtocolRequest, frozen=True):
    """Let the user do this rank's part of the step. Raises FAILURES."""

    step: int


class AwaitBarrier(ProtocolRequest, frozen=True):
    """Wait until all ranks have prepared. Raises FAILURES."""


class CommitStep(RecordStep, frozen=True):
    """Record a commit, and make the staged state the current one. Gets the time, in seconds."""

    event: events.StepCommitted


class CloseRetired(ProtocolRequest, frozen=True):
    """Close the communicators of earlier epochs: no rank waits for the next one now."""


class Settled(ProtocolRequest, frozen=True):
    """Tell the user whether the step is `committed` or the job `over`; go on at the next step."""

    committed: bool
    over: bool = False


# The protocol -----------------------------------------------------------------------------------------------------

T = TypeVar("T")
Asks = Generator[ProtocolRequest, Any, T]
"""What yields requests, and then returns."""


class StepProtocol:
    """The steps of one process, `identity`. `commits` has what it has committed; nothing else may change that."""

    def __init__(self, commits: CommitState, identity: str, timeouts: Timeouts) -> None:
        self._commits, self._identity, self._timeouts = commits, identity, timeouts
        self._recovery_times = RecoveryTimes()
        self.wants_rebuild = False
        """Set by the caller: at the next boundary between two steps, a degraded epoch ends."""
        self._built = 0
        """The epoch whose communicator this process has; 0 while it builds one."""
        self._must_rebuild = False
        """Whether a step was undone over this communicator, or not all have got or restored the state.

        No degraded epoch goes on then: it would do steps without that state.
        """
        self._is_open = self._has_results = False
        """Whether this process does a step, and whether its part of that is complete."""

    def run(self) -> Asks[None]:
        """Join the job and do its steps until it is over."""
        view: View | None
        view, was_spare = yield JoinJob()
        assert view is not None
        if view.phase != "running":
            return
        if not was_spare:
            self._commits.found()
        view = yield from self._build(view)
        while view is not None:
            view = yield from self._work_in(view)

    # Steps ----------------------------------------------------------------------------------------------------

    def _work_in(self, view: View) -> Asks[View | None]:
        """Do steps in the epoch of `view`; returns the next epoch's view, None if the job is over."""
        commits, opened, retired = self._commits, -1, True
        try:
            if not view.degraded_from:
                yield from self._synchronise()
                self._must_rebuild = False
            saves = yield StepBoundary(commits.done)
            while commits.done < commits.total and not saves and not self._rebuilds(view):
                yield Reach("step.begin")
                yield RecordStep(events.StepBegun(step=commits.done, epoch=view.epoch), in_epoch=view.epoch)
                opened, self._is_open, self._has_results = commits.done, True, False
                yield RunBody(opened)
                self._has_results = True
                yield from self._commit(view)
                if retired:
                    yield CloseRetired()
                    retired = False
                opened = -1
                yield Settled(committed=True)
                saves = yield StepBoundary(commits.done)
        except FAILURES as failure:
            following = yield from self._build((yield from self._leave(view.epoch, failure)))
        else:
            if saves:
                return (yield from self._build((yield from self._rebuild(view, "a checkpoint is due"))))
            if commits.done < commits.total:
                return (yield from self._build((yield from self._rebuild(view, "a member asks for it"))))
            return (yield from self._finish(view))
        if opened >= 0:  # and `failure`, with the frames of the user that it holds, is gone
            committed = commits.done > opened
            if not committed:
                yield RecordStep(events.StepAborted(step=opened, epoch=view.epoch))
            yield Settled(committed, over=following is None)
        return following

    def _commit(self, view: View) -> Asks[None]:
        """Agree with all ranks that the step is done, once this rank's part of it is."""
        commits = self._commits
        yield StageState(commits.done + 1)
        yield from self._prepare(view)
        yield Reach("commit.before_barrier")
        if view.degraded_from:
            yield CollectVotes(view, f"step {commits.done}", commits.vote())
        else:
            yield AwaitBarrier()
        yield Reach("commit.after_barrier")
        yield from self._note_commit(view, "normal")
        yield Reach("commit.after_commit")

    def _prepare(self, view: View) -> Asks[None]:
        yield Reach("commit.before_prepare")
        yield RecordStep(events.StepPrepared(step=self._commits.done, epoch=view.epoch), in_epoch=view.epoch)
        self._commits.prepare()

    def _note_commit(self, view: View, how: str) -> Asks[None]:
        step, normal = self._commits.done, how == "normal"
        now = yield CommitStep(
            events.StepCommitted(step=step, epoch=view.epoch, how=how), view.epoch if normal else None
        )
        self._commits.commit()
        self._is_open = False
        ended = self._recovery_times.commit(now, view, step, normal)
        if ended is not None:
            yield RecordStep(ended)

    def _synchronise(self) -> Asks[None]:
        """Transfer the state to newcomers and restore sharded state.

        All ranks that hold the state are at the start of the same step.
        """
        commits, decision = self._commits, self._commits.pending
        if decision is not None:
            taken = yield TransferState(decision, commits.done, founding=commits.standing == FOUNDER)
            if taken is not None:
                commits.take_over(taken)
                yield Reach("sync.after_load")
                yield ConfirmTransfer()
            commits.synchronised()
        restored = yield RestoreState(commits.done)
        if restored != commits.done:
            commits.go_back(restored)

    def _finish(self, view: View) -> Asks[View | None]:
        """Declare the job finished, and wait until that is agreed."""
        yield Reach("finish.before_propose")
        yield ProposeFinish(view.epoch)
        return (yield from self._build((yield AwaitView(view.epoch))))

    # The next epoch -------------------------------------------------------------------------------------------

    def _leave(self, epoch: int, failure: HoldfastError) -> Asks[View]:
        """Wait until `epoch` is over; if the detectors find no cause meanwhile, end it here. Returns the next view.

        Raises `failure` once more than `BROKEN_EPOCHS` epochs would end this way between two commits.
        """
        failure = yield LeaveEpoch(failure)
        if not (yield AwaitEnd(epoch, EVIDENT_SECONDS)):
            yield ReportFailure(failure)
        if not (yield AwaitEnd(epoch, 3 * self._timeouts.suspect + 2 * self._timeouts.heartbeat)):
            if not self._commits.may_break():
                raise failure
            yield BreakEpoch(epoch, failure)
        view: View = yield AwaitView(epoch, failure)
        return view

    def _rebuilds(self, view: View) -> bool:
        """Whether the epoch of `view` ends at this boundary; only a degraded one can."""
        if not view.degraded_from:
            self.wants_rebuild = False
        return self.wants_rebuild

    def _rebuild(self, view: View, why: str) -> Asks[View]:
        """End the degraded epoch of `view`; returns the next view."""
        failure = Revoked(view.epoch, why)
        yield BreakEpoch(view.epoch, failure)
        following: View = yield AwaitView(view.epoch, failure)
        return following

    def _build(self, view: View) -> Asks[View | None]:
        """Connect the members of `view`, or of the first later view that holds, and close the open step.

        Those of a degraded view only vote. Returns the view; None if the job is over.
        """
        began = yield Now()
        while view.phase == "running":
            rank = view.rank_of(self._identity)
            assert rank is not None
            if view.degraded_from not in (0, self._built):
                view = yield from self._rebuild(view, "a member has not built the communicator of the others")
                continue
            try:
                decision = yield from self._agree(view, rank)
            except FAILURES as failure:
                view = yield from self._leave(view.epoch, failure)
                continue
            if decision.committed:
                yield from self._note_commit(view, "recovered")
            self._commits.settle(decision)
            undone, self._is_open = self._is_open and not decision.committed, False
            if view.degraded_from:
                self._must_rebuild |= undone or bool(decision.receivers)
                if self._must_rebuild or view.job.on_death == "finish_step":
                    view = yield from self._rebuild(view, "the step that was open at the death is closed")
                    continue
                return view
            self._built, self._must_rebuild = view.epoch, True
            seconds = (yield Now()) - began
            size = len(view.members)
            yield RecordStep(events.CommunicatorBuilt(epoch=view.epoch, seconds=seconds, rank=rank, size=size))
            return view
        if not view.stopped and self._commits.finishes():
            yield from self._note_commit(view, "finished")
        return None

    def _agree(self, view: View, rank: int) -> Asks[Decision]:
        """Connect the members of `view`, or vote with them; returns what becomes of the open step."""
        yield Reach("rebuild.before_connect", view)
        votes: Sequence[Vote]
        if view.degraded_from:
            if self._is_open and self._has_results and not self._commits.prepared:
                yield from self._prepare(view)
            votes = yield CollectVotes(view, "open step", self._commits.vote())
        else:
            self._built = 0
            votes = yield Connect(view, rank, self._commits.vote())
        decision = decide(votes, rank)
        yield Reach("rebuild.after_votes")
        return decision


_USUAL = 64


class RecoveryTimes:
    """The longest time between two commits of one process across a change of view."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._view: View | None = None
        self._longest = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL)

    def commit(self, now: float, view: View, step: int, normal: bool) -> events.RecoveryEnded | None:
        """Note a commit of `step` at `now` (seconds) in `view`: a `normal` one, or one that a rebuild found out.

        For the first normal commit of a view after an earlier view, returns the event: the longest time between two
        commits since that view (`seconds`), the time that a step takes (`usual`, the median), and how many members
        `joined` and `left`. Otherwise None.
        """
        last, before = self._last, self._view
        self._last = now
        if last is None or before is None:
            self._view = view
            return None
        if before.epoch == view.epoch:
            self._usual.append(now - last)
            return None
        self._longest = max(self._longest, now - last)
        if not normal:
            return None
        seconds, self._longest, self._view = self._longest, 0.0, view
        joined = sum(before.rank_of(member.id) is None for member in view.members)
        usual = median(self._usual) if self._usual else None
        left = len(view.left_since(before))
        return events.RecoveryEnded(step=step, epoch=view.epoch, seconds=seconds, usual=usual, joined=joined, left=left)
