"""The protocol of steps, without processes: no failure loses a committed step or repeats it."""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from holdfast.comms import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked, StaleEpoch
from holdfast.comms.transport.base import Peer
from holdfast.ft import step_protocol as protocol
from holdfast.ft.events import (
    CommunicatorBuilt,
    Event,
    RecoveryEnded,
    StepAborted,
    StepBegun,
    StepCommitted,
    StepPrepared,
)
from holdfast.ft.membership.view import Job, Member, OnDeath, Timeouts, View
from holdfast.ft.step_protocol import BROKEN_EPOCHS, FAILURES, HOLDER, NEWCOMER, CommitState, Decision, Vote
from holdfast.harness.simulate.known_bugs.reproduce import KNOWN_BUGS

JOB = Job("job", 3, 1, 3, ("shm",), "shm")
STEPS = 2


def view_of(epoch: int, names: list[str], phase: Any = "running", job: Job = JOB, degraded_from: int = 0) -> View:
    members = tuple(Member(name, "x:1", Peer("here", 1, 0)) for name in names)
    return View(epoch, phase, members, job, "test", degraded_from=degraded_from)


# -- a model of a job: the protocol of each rank, and ops that fail


@dataclass
class Rank:
    """One process. `history` is its state: each step in it, with the epoch of the attempt that made it.

    `epoch` is that of its communicator, over which it does each step once: `begun` has them.
    """

    name: str
    origin: str
    spare: bool
    commits: CommitState = field(default_factory=CommitState)
    history: list[tuple[int, int]] = field(default_factory=list)
    attempt: tuple[int, int] = (-1, 0)
    opened: int = -1
    epoch: int = 0
    ended: HoldfastError | None = None
    finished: bool = False
    begun: set[tuple[int, int]] = field(default_factory=set)
    restored: int = 0
    """The epoch in which it has restored its state."""

    def __post_init__(self) -> None:
        self.commits.total = STEPS
        self.protocol = protocol.StepProtocol(self.commits, self.name, Timeouts())
        self.steps = self.protocol.run()
        self.request: protocol.ProtocolRequest = next(self.steps)

    @property
    def active(self) -> bool:
        return self.ended is None and not self.finished


FALLIBLE = (
    protocol.Connect,
    protocol.TransferState,
    protocol.ConfirmTransfer,
    protocol.RestoreState,
    protocol.StepBoundary,
    protocol.RunBody,
    protocol.StageState,
    protocol.AwaitBarrier,
)
"""The requests that may raise `FAILURES`."""


class ModelJob:
    """Runs the protocols of all ranks one request at a time; a tape gives the order and the faults."""

    def __init__(self, size: int, on_death: OnDeath = "rebuild") -> None:
        self.job = structs.replace(JOB, on_death=on_death)
        self.broken: set[int] = set()
        """The epochs that a member has ended by itself."""
        self.names = (f"p{number}" for number in count())
        self.ranks = {name: Rank(name, name, False) for name in (next(self.names) for _ in range(size))}
        self.views = [view_of(1, list(self.ranks), job=self.job)]
        self.over: set[int] = set()
        self.ops: dict[tuple[int, str], dict[str, Any]] = {}
        self.committed: dict[tuple[int, int], int] = {}
        """By the number of returns to a checkpoint and the step, the epoch of the attempt that is committed."""
        self.restored: dict[int, int] = {}
        """By epoch, the number of steps in the checkpoint that all its ranks return to."""

    # What may happen next

    def actions(self) -> list[Callable[[], None]]:
        """All that may happen next without a new fault."""
        found: list[Callable[[], None]] = []
        newest = self.views[-1]
        active = [rank for rank in self.ranks.values() if rank.active]
        for rank in active:
            self._answers(rank)  # all have entered the ops that they wait in
        for rank in active:
            if self._answers(rank):
                found.append(lambda rank=rank: self._go_on(rank))
            if isinstance(rank.request, FALLIBLE) and rank.epoch in self.over:
                why = PeerFailed((0,), "it died") if rank.epoch % 2 else Revoked(rank.epoch, "over")
                found.append(lambda rank=rank, why=why: self._throw(rank, why))
            votes = isinstance(rank.request, protocol.CollectVotes)
            if (rank.request.view.epoch if votes else getattr(rank.request, "in_epoch", None)) in self.over:
                found.append(lambda rank=rank: self._throw(rank, Revoked(rank.epoch, "over")))
        lost = [member.id for member in newest.members if not self.ranks[member.id].active]
        if newest.phase == "running" and (lost or newest.epoch in self.over):
            found.append(lambda: self._next_view(without=lost))
        return found

    def faults(self) -> list[Callable[[], None]]:
        """All faults that may come now."""
        found: list[Callable[[], None]] = []
        if self.views[-1].phase != "running":
            return found
        members = [self.ranks[member.id] for member in self.views[-1].members]
        active = [rank for rank in members if rank.active]
        for rank in active:
            if self.job.on_death == "go_on":
                found.append(lambda rank=rank: setattr(rank.protocol, "wants_rebuild", True))
            found.append(lambda rank=rank: setattr(rank, "ended", HoldfastError("killed")))
            if isinstance(rank.request, FALLIBLE):
                found.append(lambda rank=rank: self._throw(rank, OpTimeout("barrier", rank.epoch, 1.0)))
            if len(active) > 1:
                found.append(lambda rank=rank: self._next_view(without=[rank.name]))
        if len(members) < 4:
            found.append(self._join)
        epoch = self.views[-1].epoch
        found += [lambda done=done: self.restored.setdefault(epoch, done) for done in range(STEPS)]
        return found

    def _next_view(self, without: list[str] = [], joining: list[str] = []) -> None:  # noqa: B006
        newest = self.views[-1]
        self.over.add(newest.epoch)
        names = [member.id for member in newest.members if member.id not in without and self.ranks[member.id].active]
        degraded_from = 0
        proven = not joining and not any(self.ranks[name].active for name in without)
        if proven and self.job.on_death != "rebuild" and newest.epoch not in self.broken:
            degraded_from = newest.degraded_from or newest.epoch
        if names or joining:
            self.views.append(view_of(newest.epoch + 1, [*names, *joining], "running", self.job, degraded_from))
        else:
            self.views.append(view_of(newest.epoch + 1, [member.id for member in newest.members], "failed"))

    def _join(self) -> None:
        name = next(self.names)
        self.ranks[name] = Rank(name, name, True)
        self._next_view(joining=[name])

    # Requests

    def _answers(self, rank: Rank) -> bool:
        """Whether the request of a rank can be answered now. Enters the op that it asks for."""
        request, newest = rank.request, self.views[-1]
        match request:
            case protocol.JoinJob():
                return newest.rank_of(rank.name) is not None or newest.phase != "running"
            case protocol.AwaitView(newer_than):
                return newest.epoch > newer_than and newest.epoch not in self.over
            case protocol.Connect(view):
                rank.epoch = view.epoch
                return self._meets(rank, "connect", request.vote)
            case protocol.TransferState(decision) if self._number(rank) in decision.receivers:
                source = self.views[rank.epoch - 1].members[decision.source].id
                return source in self.ops.get((rank.epoch, "arrived"), {})
            case protocol.TransferState() | protocol.ConfirmTransfer():
                return self._meets(rank, "arrived")
            case protocol.CollectVotes(view, name, vote):
                return self._meets(rank, name, vote, view)
            case protocol.AwaitBarrier():
                return self._meets(rank, f"barrier {rank.commits.done}")
        return True

    def _number(self, rank: Rank) -> int:
        return self.views[rank.epoch - 1].ranks[rank.name]

    def _meets(self, rank: Rank, name: str, value: Any = None, view: View | None = None) -> bool:
        """Enter an op of the members of `view`, or over the communicator; whether all have."""
        view = view or self.views[rank.epoch - 1]
        values = self.ops.setdefault((view.epoch, name), {})
        values.setdefault(rank.name, value)
        return len(values) == len(view.members)

    def _go_on(self, rank: Rank) -> None:
        """Answer the request of a rank."""
        request, newest, answer = rank.request, self.views[-1], None
        match request:
            case protocol.JoinJob():
                answer = newest, rank.spare
            case protocol.AwaitView():
                if newest.phase == "failed" or (newest.phase == "running" and newest.rank_of(rank.name) is None):
                    self._throw(rank, StaleEpoch("evicted"))
                    return
                answer = newest
            case protocol.Connect(view) | protocol.CollectVotes(view):
                votes = self.ops[view.epoch, getattr(request, "name", "connect")]
                answer = [votes[member.id] for member in view.members]
            case protocol.TransferState(decision) if self._number(rank) in decision.receivers:
                source = self.ranks[self.views[rank.epoch - 1].members[decision.source].id]
                rank.history, rank.origin = list(source.history), source.origin
                answer = len(rank.history)
            case protocol.RestoreState(done):
                answer = min(done, self.restored.setdefault(rank.epoch, done))
                del rank.history[answer:]
                rank.restored = rank.epoch
            case protocol.AwaitEnd(epoch):
                answer = epoch in self.over
            case protocol.BreakEpoch(epoch):
                self.over.add(epoch)
                self.broken.add(epoch)
            case protocol.LeaveEpoch(failure):
                answer = failure
            case protocol.ProposeFinish(epoch):
                if newest.epoch == epoch and epoch not in self.over:
                    self.over.add(epoch)
                    self.views.append(view_of(epoch + 1, [member.id for member in newest.members], "finished"))
            case protocol.Now():
                answer = 0.0
            case protocol.RecordStep(StepPrepared(step=step)):
                rank.attempt = step, rank.epoch
            case protocol.CommitStep(event):
                self._note_commit(rank, event.step)
            case protocol.RunBody(step):
                assert step == len(rank.history), "a step is done that is not the next one"
                assert rank.restored == rank.epoch, "a step is done on a state that is not restored"
                assert (rank.epoch, step) not in rank.begun, "a step is done twice over one communicator"
                rank.begun.add((rank.epoch, step))
                if rank.epoch in (newest.epoch, newest.degraded_from):
                    assert (rank.commits.rewinds, step) not in self.committed, "a committed step is done again"
            case protocol.Settled(committed):
                assert committed == (len(rank.history) > rank.opened), "the user is told the opposite"
        self._resume(rank, lambda: rank.steps.send(answer))

    def _note_commit(self, rank: Rank, step: int) -> None:
        assert step == len(rank.history), f"step {step} is committed after {rank.history}"
        assert rank.attempt[0] == step, f"{rank.name} commits step {step}, and has not prepared it"
        rank.history.append(rank.attempt)
        committed = self.committed.setdefault((rank.commits.rewinds, step), rank.attempt[1])
        assert committed == rank.attempt[1], "ranks commit different attempts"

    def _throw(self, rank: Rank, error: HoldfastError) -> None:
        self._resume(rank, lambda: rank.steps.throw(error))

    def _resume(self, rank: Rank, resume: Callable[[], protocol.ProtocolRequest]) -> None:
        if isinstance(rank.request, protocol.RunBody):
            rank.opened = rank.request.step
        try:
            rank.request = resume()
        except StopIteration:
            rank.finished = True
        except HoldfastError as error:
            assert not isinstance(error, Mismatch), error
            rank.ended = error

    # A whole run

    def run(self, tape: Iterator[int]) -> None:
        """Follow the tape, and then go on without faults to the end."""
        for choice in tape:
            faults = self.faults() if choice % 24 == 23 else []
            actions = faults or self.actions()
            if not actions:
                break
            actions[choice // 24 % len(actions)]()
        for turn in count():
            actions = self.actions()
            if not actions:
                break
            actions[turn % len(actions)]()
            assert turn < 10_000, "the job goes on for ever"
        self._check_the_end()

    def _check_the_end(self) -> None:
        last = self.views[-1]
        for rank in self.ranks.values():
            assert rank.finished or rank.ended is not None, f"{rank.name} waits for ever for {rank.request}"
            if rank.finished and last.rank_of(rank.name) is not None:
                assert rank.commits.done == STEPS
                assert [step for step, _ in rank.history] == list(range(STEPS))
        holders = [rank for rank in self.ranks.values() if rank.finished and rank.commits.standing == HOLDER]
        assert len({rank.origin for rank in holders}) <= 1, "they founded different jobs"
        assert len({tuple(rank.history) for rank in holders}) <= 1, "they hold different states"


@pytest.mark.parametrize("on_death", ["rebuild", "finish_step", "go_on"])
@given(st.integers(1, 4), st.lists(st.integers(0, 24 * 840 - 1), max_size=250))
def test_whatever_fails_wherever_no_committed_step_is_lost_or_done_twice(
    on_death: OnDeath, size: int, tape: list[int]
) -> None:
    """Kills, evictions, joins, returns to a checkpoint, ops that time out, in any order of the ranks' progress.

    In degraded epochs the living finish a step whose results they have, and go on over what is left.
    """
    ModelJob(size, on_death).run(iter(tape))


def random_tape(seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    return (draw.randrange(24 * 840) for _ in range(draw.randrange(50, 400)))


def test_a_founder_that_has_seen_the_others_commit_does_not_begin_anew() -> None:
    """It missed the first transfer, the only other rank committed a step alone, and died."""
    ModelJob(2).run(random_tape(15059))


def test_a_job_without_faults_commits_each_step_once_in_one_epoch() -> None:
    job = ModelJob(3)
    job.run(iter(()))
    assert job.committed == {(0, step): 1 for step in range(STEPS)}
    assert all(rank.finished and rank.origin == "p0" for rank in job.ranks.values())


@pytest.mark.parametrize(
    "name",
    [
        "commit by a minority",
        "commit lost",
        "straggler left behind",
        "newcomer claims the state",
        "newcomer a step behind",
        "commit by those believed alive",
        "last step dropped",
    ],
)
def test_the_model_finds_each_known_bug_of_the_commit(name: str) -> None:
    bug = next(bug for bug in KNOWN_BUGS if bug.name == name)
    with bug.inject():
        for seed in range(3000):
            try:
                ModelJob(3).run(random_tape(seed))
            except AssertionError:
                return
    pytest.fail("it was not found")


# -- one rank

Asked = TypeVar("Asked", bound=protocol.ProtocolRequest)
GO_ON = structs.replace(JOB, on_death="go_on")
DIED = PeerFailed((1,), "it died")


class Alone:
    """The protocol of a job's only rank, which a test drives. Other members, where there are some, vote as it does.

    `following`: the views that come after the first; then the rank is the only one, in one epoch after another.
    """

    def __init__(self, first: View | None = None, *following: View, steps: int = 2, spare: bool = False) -> None:
        self.commits = CommitState()
        self.commits.total = steps
        self.view = first or view_of(1, ["p0"])
        self.following, self.spare, self.now = deque(following), spare, 0.0
        self.protocol = protocol.StepProtocol(self.commits, "p0", Timeouts(heartbeat=0.25, suspect=2.0))
        self.steps = self.protocol.run()
        self.request: protocol.ProtocolRequest | None = next(self.steps)

    def answer(self) -> Any:
        match self.request:
            case protocol.JoinJob():
                return self.view, self.spare
            case protocol.AwaitView(newer_than):
                phase = "finished" if self.commits.done == self.commits.total else "running"
                self.view = self.following.popleft() if self.following else view_of(newer_than + 1, ["p0"], phase)
                return self.view
            case protocol.Connect(view, _, vote) | protocol.CollectVotes(view, _, vote):
                return [vote] * len(view.members)
            case protocol.RestoreState(done):
                return done
            case protocol.AwaitEnd():
                return True
            case protocol.LeaveEpoch(failure):
                return failure
            case protocol.CommitStep() | protocol.Now():
                return self.now
        return None

    def go_on(self, error: HoldfastError | None = None) -> None:
        self._resume(lambda: self.steps.throw(error) if error is not None else self.steps.send(self.answer()))

    def go_on_with(self, answer: Any) -> None:
        self._resume(lambda: self.steps.send(answer))

    def _resume(self, resume: Callable[[], protocol.ProtocolRequest]) -> None:
        try:
            self.request = resume()
        except StopIteration:
            self.request = None

    def all_requests(self) -> list[protocol.ProtocolRequest]:
        """Go on to the end; the requests on the way."""
        requests = []
        while self.request is not None:
            requests.append(self.request)
            self.go_on()
        return requests

    def go_to(self, kind: type[protocol.ProtocolRequest]) -> list[protocol.ProtocolRequest]:
        """Go on to the next request of a kind; the requests before it."""
        requests = []
        while not isinstance(self.request, kind):
            assert self.request is not None, f"no {kind.__name__} after {requests}"
            requests.append(self.request)
            self.go_on()
        return requests

    def fail_at(self, kind: type[protocol.ProtocolRequest], why: HoldfastError = DIED) -> None:
        """Go on to the next request of a kind, and let it fail."""
        self.go_to(kind)
        self.go_on(why)


def of_kind(requests: Iterable[protocol.ProtocolRequest], *kinds: type[Asked]) -> list[Asked]:
    return [request for request in requests if isinstance(request, kinds)]


def recorded(requests: Iterable[protocol.ProtocolRequest]) -> list[Event]:
    return [request.event for request in of_kind(requests, protocol.RecordStep)]


def at_request(number: int) -> Alone:
    alone = Alone()
    for _ in range(number):
        alone.go_on()
    return alone


def in_epoch(request: protocol.ProtocolRequest) -> bool:
    return getattr(request, "in_epoch", None) is not None


ERRORS = [PeerFailed((0,), "it died"), Revoked(1, "over"), OpTimeout("barrier", 1, 1.0)]


def test_any_failure_at_any_request_leads_to_the_next_epoch_and_to_the_end_of_the_job() -> None:
    requests = Alone().all_requests()
    fallible = [n for n, request in enumerate(requests) if isinstance(request, FALLIBLE) or in_epoch(request)]
    assert len(fallible) >= 10
    for number in fallible:
        for error in ERRORS:
            alone = at_request(number)
            alone.go_on(error)
            assert alone.request == protocol.LeaveEpoch(error), f"after {requests[number]}"
            steps = [request.step for request in alone.all_requests() if isinstance(request, protocol.RunBody)]
            assert alone.commits.done == 2
            assert sorted(set(steps)) == steps, "each once after the failure"


def test_any_other_error_at_any_request_ends_the_steps() -> None:
    for number in range(len(Alone().all_requests())):
        alone = at_request(number)
        with pytest.raises(StaleEpoch, match="evicted"):
            alone.go_on(StaleEpoch("evicted"))


def test_the_user_is_told_of_the_outcome_after_the_next_epoch_stands() -> None:
    alone = Alone()
    alone.fail_at(protocol.RunBody)
    recovery = alone.go_to(protocol.Settled)
    assert alone.request == protocol.Settled(committed=False, over=False)
    events = recorded(recovery)
    assert [type(event) for event in events] == [CommunicatorBuilt, StepAborted]
    assert getattr(events[1], "epoch", 0) == 1, "the attempt's, not the next one"


def test_a_failure_without_a_cause_is_reported_and_then_ends_the_epoch_a_few_times_at_most() -> None:
    alone, failure = Alone(steps=4), OpTimeout("barrier", 1, 1.0)
    no_cause(alone, failure)
    alone.go_to(protocol.Settled)  # it is undone
    alone.go_on()
    alone.go_to(protocol.Settled)  # it is committed: the count begins anew
    for _ in range(BROKEN_EPOCHS):
        kinds, waits = no_cause(alone, failure)
        assert kinds == ["LeaveEpoch", "AwaitEnd", "ReportFailure", "AwaitEnd", "BreakEpoch"]
        assert waits == [protocol.EVIDENT_SECONDS, 3 * 2.0 + 2 * 0.25], "three silences and two heartbeats"
    with pytest.raises(OpTimeout):
        no_cause(alone, failure)


def no_cause(alone: Alone, failure: HoldfastError) -> tuple[list[str], list[float]]:
    """Fail the next body, and let nothing end the epoch.

    The kinds of requests up to the wait for the next view, and the times in which the detectors may find the cause.
    """
    alone.fail_at(protocol.RunBody, failure)
    kinds, waits = [], []
    while not isinstance(alone.request, protocol.AwaitView):
        kinds.append(type(alone.request).__name__)
        if isinstance(alone.request, protocol.AwaitEnd):
            waits.append(alone.request.seconds)
            alone.go_on_with(False)
        else:
            alone.go_on()
    return kinds, waits


def test_a_failure_leaves_no_reference_to_the_frames_of_the_user_behind() -> None:
    """Those may hold tensors of gigabytes, and the step is done again."""

    class Large:
        pass

    def body() -> weakref.ref[Large]:
        large = Large()
        try:
            raise PeerFailed((1,), "it died")
        except FAILURES as failure:
            alone.go_on(failure)
        alone.go_to(protocol.Settled)
        return weakref.ref(large)

    alone = Alone()
    alone.go_to(protocol.RunBody)
    assert body()() is None


def test_each_step_is_staged_prepared_and_committed_while_its_epoch_is_held() -> None:
    requests = Alone().all_requests()
    assert of_kind(requests, protocol.StageState) == [protocol.StageState(1), protocol.StageState(2)]
    events = [(type(it.event), it.in_epoch) for it in of_kind(requests, protocol.RecordStep) if it.in_epoch]
    assert events == [(StepBegun, 1), (StepPrepared, 1), (StepCommitted, 1)] * 2
    assert of_kind(requests, protocol.Settled) == [protocol.Settled(committed=True, over=False)] * 2


def test_communicators_of_earlier_epochs_are_closed_once_in_each_epoch_after_its_first_commit() -> None:
    alone = Alone(steps=4)
    alone.go_to(protocol.Settled)
    alone.go_on()
    alone.fail_at(protocol.Settled)
    requests = alone.all_requests()
    kinds = (protocol.CloseRetired, protocol.CommitStep)
    assert [type(request) for request in of_kind(requests, *kinds)] == [kinds[1], kinds[0], kinds[1]]
    first = [type(request) for request in of_kind(Alone(steps=3).all_requests(), *kinds)]
    assert first == [kinds[1], kinds[0], kinds[1], kinds[1]]


def test_the_time_that_a_communicator_took_to_build_is_reported() -> None:
    alone = Alone(view_of(1, ["p1", "p0"]))
    alone.go_to(protocol.Now)
    alone.now = 2.0
    alone.go_to(protocol.Connect)
    alone.now = 5.0
    assert recorded(alone.go_to(protocol.StepBoundary)) == [CommunicatorBuilt(epoch=1, seconds=3.0, rank=1, size=2)]


def recoveries(steps: int, *epochs: tuple[tuple[float, ...], Any]) -> list[Event]:
    """The recoveries of a rank that commits at these times in each epoch, until it fails at a request of that kind."""
    alone = Alone(view_of(1, ["p0", "p1"]), view_of(2, ["p0", "p2", "p3"]), steps=steps)
    passed = []
    for times, fails_at in epochs:
        for now in times:
            passed += alone.go_to(protocol.CommitStep)
            alone.now = now
            alone.go_on()
        if fails_at is not None:
            alone.fail_at(fails_at)
    return [event for event in recorded([*passed, *alone.all_requests()]) if isinstance(event, RecoveryEnded)]


def test_the_first_step_done_after_a_change_of_members_reports_the_longest_time_between_two_commits() -> None:
    """The rebuild finds out that step 3 is committed; one step gives no usual time."""
    epochs = ((0.0, 1.0, 3.0), protocol.AwaitBarrier), ((10.0, 14.0, 15.0), protocol.RunBody), ((17.0,), None)
    assert recoveries(7, *epochs) == [
        RecoveryEnded(step=4, epoch=2, seconds=7.0, usual=1.5, joined=2, left=1),
        RecoveryEnded(step=6, epoch=3, seconds=2.0, usual=1.0, left=2),
    ]
    once = RecoveryEnded(step=1, epoch=2, seconds=3.0, usual=None, joined=2, left=1)
    assert recoveries(2, ((1.0,), protocol.RunBody), ((4.0,), None)) == [once]


def test_only_the_state_that_a_job_is_founded_with_is_transferred_as_such() -> None:
    alone = Alone(view_of(1, ["p0", "p1"]), view_of(2, ["p0", "p1", "p2"]))
    alone.go_to(protocol.TransferState)
    assert alone.request == protocol.TransferState(Decision(False, 0, 0, (1,), 0), 0, founding=True)
    alone.fail_at(protocol.RunBody)
    alone.go_to(protocol.Connect)
    mine = alone.commits.vote()
    alone.go_on_with([mine, mine, Vote(NEWCOMER, 0, False, 2)])
    alone.go_to(protocol.TransferState)
    assert alone.request == protocol.TransferState(Decision(False, 0, 0, (2,), 0), 0, founding=False)


def test_a_newcomer_confirms_that_it_has_the_state_and_goes_on_at_the_step_after_it() -> None:
    alone = Alone(view_of(1, ["p1", "p0"]), spare=True, steps=8)
    alone.go_to(protocol.Connect)
    alone.go_on_with([Vote(HOLDER, 5, False, 8), alone.commits.vote()])
    alone.go_to(protocol.TransferState)
    alone.go_on_with(5)
    assert len(of_kind(alone.go_to(protocol.RunBody), protocol.ConfirmTransfer)) == 1
    assert alone.request == protocol.RunBody(5)


def test_a_rank_that_returns_to_a_checkpoint_repeats_the_steps_after_it() -> None:
    alone = Alone()
    alone.go_to(protocol.Settled)
    alone.fail_at(protocol.RunBody)
    alone.go_to(protocol.RestoreState)
    assert alone.request == protocol.RestoreState(1)
    alone.go_on_with(0)
    alone.go_to(protocol.RunBody)
    assert alone.request == protocol.RunBody(0)
    assert alone.commits.vote() == Vote(HOLDER, 0, False, 2, rewinds=1)


# -- the end of the job


def test_a_rank_that_has_done_all_steps_waits_until_the_end_is_agreed() -> None:
    alone = Alone(view_of(1, ["p0"]), view_of(2, ["p0"]))
    alone.go_to(protocol.ProposeFinish)
    alone.go_on()
    assert alone.request == protocol.AwaitView(1)
    assert alone.go_to(protocol.ProposeFinish), "a member joined meanwhile: it needs the state of this rank"
    assert alone.request == protocol.ProposeFinish(2)


def test_a_step_that_the_others_finished_the_job_with_is_committed_and_the_user_told_that_the_job_is_over() -> None:
    alone = Alone(view_of(1, ["p0", "p1"]), view_of(2, ["p0", "p1"], "finished"), steps=1)
    alone.fail_at(protocol.AwaitBarrier)
    requests = alone.all_requests()
    commits = of_kind(requests, protocol.CommitStep)
    assert commits == [protocol.CommitStep(StepCommitted(step=0, epoch=2, how="finished"))]
    assert requests[-1] == protocol.Settled(committed=True, over=True)


def test_a_job_that_is_stopped_may_lack_steps_and_one_that_finishes_may_not() -> None:
    finished = view_of(2, ["p0"], "finished")
    stopped = Alone(None, structs.replace(finished, stopped=True))
    stopped.fail_at(protocol.RunBody)
    assert stopped.all_requests()[-1] == protocol.Settled(committed=False, over=True)
    lacking = Alone(None, finished)
    lacking.fail_at(protocol.RunBody)
    with pytest.raises(HoldfastError, match="after 0 of 2 steps here"):
        lacking.all_requests()
    newcomer = Alone(None, finished, spare=True)
    newcomer.fail_at(protocol.Connect)
    with pytest.raises(HoldfastError, match="before this process, a newcomer to it, was given its state"):
        newcomer.all_requests()


@pytest.mark.parametrize("phase", ["finished", "failed"])
def test_a_process_that_comes_after_the_end_does_nothing(phase: Any) -> None:
    assert Alone(view_of(3, ["p0"], phase)).all_requests() == [protocol.JoinJob()]


# -- degraded epochs


def degraded(job: Job = GO_ON) -> View:
    return view_of(2, ["p0"], job=job, degraded_from=1)


FIRST = view_of(1, ["p0", "p1"], job=GO_ON)


def story(requests: Iterable[protocol.ProtocolRequest]) -> list[str]:
    """What a rank does about an open step, and about its communicator."""
    told = []
    for request in requests:
        match request:
            case protocol.CollectVotes(view, name, vote):
                told.append(f"{name}: {'has prepared' if vote.prepared else 'lacks'} {vote.done}, in {view.epoch}")
            case protocol.RecordStep(StepPrepared(step=step) | StepAborted(step=step) as event):
                told.append(f"{event.kind} {step}")
            case protocol.CommitStep(event, in_epoch):
                held = f" and holds epoch {in_epoch}" if in_epoch else ""
                told.append(f"commits {event.step} in {event.epoch}, {event.how}{held}")
            case protocol.Settled(committed, over):
                told.append(f"tells {committed}{', the end' if over else ''}")
            case (
                protocol.BreakEpoch()
                | protocol.Connect()
                | protocol.TransferState()
                | protocol.RestoreState()
                | protocol.AwaitBarrier()
            ):
                told.append(type(request).__name__)
    return told


VOTED, OPEN = "open step: has prepared 0, in 2", "open step: lacks 0, in 2"
COMMITS = "commits 0 in 2, recovered"
AGAIN = ["BreakEpoch", "Connect"]


@pytest.mark.parametrize(
    ("done", "fails_at", "on_death", "expected", "then"),
    [
        (0, protocol.AwaitBarrier, "go_on", [VOTED, COMMITS, "tells True"], (1, 2)),
        (0, protocol.StageState, "go_on", ["prepared 0", VOTED, COMMITS, "tells True"], (1, 2)),
        (0, protocol.RunBody, "go_on", [OPEN, *AGAIN, "aborted_step 0", "tells False", "RestoreState"], (0, 3)),
        (0, protocol.AwaitBarrier, "finish_step", [VOTED, COMMITS, *AGAIN, "tells True", "RestoreState"], (1, 3)),
        (0, protocol.RestoreState, "go_on", [OPEN, *AGAIN, "RestoreState"], (0, 3)),
        (0, protocol.StepBoundary, "go_on", [OPEN], (0, 2)),
        (1, protocol.StepBoundary, "go_on", ["open step: lacks 1, in 2"], (1, 2)),
    ],
)
def test_an_open_step_is_committed_in_a_degraded_epoch_or_done_again_over_a_new_communicator(
    done: int, fails_at: Any, on_death: OnDeath, expected: list[str], then: tuple[int, int]
) -> None:
    """A step that all have prepared, or have the results of, is committed; a death between two leaves nothing open.

    After one before all had restored their state, the degraded epoch does not go on.
    """
    job = structs.replace(JOB, on_death=on_death)
    alone = Alone(structs.replace(FIRST, job=job), degraded(job))
    for _ in range(done):
        alone.go_to(protocol.Settled)
    alone.fail_at(fails_at)
    assert story(alone.go_to(protocol.RunBody)) == expected
    assert alone.request == protocol.RunBody(then[0]) and alone.view.epoch == then[1]
    if then == (1, 2):  # it goes on; a barrier would have a dead member
        steps = ["prepared 1", "step 1: has prepared 1, in 2", "commits 1 in 2, normal and holds epoch 2"]
        assert story(alone.go_to(protocol.Settled)) == steps


def test_a_degraded_epoch_ends_if_a_member_lacks_the_state() -> None:
    alone = Alone(view_of(1, ["p0", "p1", "p2"], job=GO_ON), structs.replace(FIRST, epoch=2, degraded_from=1))
    alone.fail_at(protocol.AwaitBarrier)
    alone.go_to(protocol.CollectVotes)
    alone.go_on_with([alone.commits.vote(), Vote(NEWCOMER, 0, False, 2)])
    assert len(of_kind(alone.go_to(protocol.RunBody), protocol.BreakEpoch, protocol.Connect)) == 2


def test_a_member_without_the_communicator_of_the_others_asks_for_a_new_one() -> None:
    new = Alone(degraded(), spare=True)
    failed = Alone(FIRST, degraded())
    failed.fail_at(protocol.Connect)
    for alone in (new, failed):
        assert of_kind(alone.go_to(protocol.BreakEpoch), protocol.CollectVotes) == []
        alone.go_to(protocol.Connect)
        assert alone.view.epoch == 3


@pytest.mark.parametrize("why", ["a member asks for it", "a checkpoint is due"])
def test_a_degraded_epoch_ends_at_the_next_boundary(why: str) -> None:
    asks = why == "a member asks for it"
    alone = Alone(FIRST, degraded(), steps=4)
    alone.protocol.wants_rebuild = asks  # which is forgotten: this epoch is whole
    alone.fail_at(protocol.AwaitBarrier)
    alone.go_to(protocol.Settled)
    alone.go_on()
    assert of_kind(alone.go_to(protocol.StepBoundary), protocol.BreakEpoch) == []
    alone.protocol.wants_rebuild = asks
    alone.go_on_with(not asks)
    assert of_kind(alone.go_to(protocol.BreakEpoch), protocol.RunBody) == []
    assert why in str(alone.request)
    passed = alone.all_requests()
    assert [request.step for request in of_kind(passed, protocol.RunBody)] == [1, 2, 3]
    assert len(of_kind(passed, protocol.BreakEpoch)) == 1, "the new epoch is whole"
