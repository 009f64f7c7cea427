"""What becomes of an open step when its epoch has ended: votes, decisions, what one process has committed, and when."""

from __future__ import annotations

import pytest

from holdfast.comms import HoldfastError, Mismatch
from holdfast.ft.events import RecoveryEnded
from holdfast.ft.step_protocol import (
    FIELDS,
    FOUNDER,
    HOLDER,
    NEWCOMER,
    CommitState,
    RecoveryTimes,
    Vote,
    decide,
)
from support.views import view_of


def holder(done: int, prepared: bool) -> Vote:
    return Vote(HOLDER, done, prepared, 10)


@pytest.mark.parametrize(
    ("votes", "committed", "done"),
    [
        ([(4, True), (4, True)], [True, True], 5),
        ([(4, True), (4, False)], [False, False], 4),
        ([(5, False), (4, True), (5, True)], [False, True, False], 5),
    ],
)
def test_recovery_commits_a_step_that_all_had_prepared_or_one_has_committed(
    votes: list[tuple[int, bool]], committed: list[bool], done: int
) -> None:
    """Else, it is done again: as is the one after a step that a rank has committed."""
    decisions = [decide([holder(*vote) for vote in votes], rank) for rank in range(len(votes))]
    assert ([each.committed for each in decisions], {each.done for each in decisions}) == (committed, {done})


def test_newcomers_have_no_vote_and_get_the_state_from_the_first_member_that_has_it() -> None:
    votes = [Vote(NEWCOMER, 0, False, 10), holder(4, True), holder(4, True), Vote(FOUNDER, 0, False, 10)]
    decision = decide(votes, 1)
    assert (decision.committed, decision.done) == (True, 5)
    assert (decision.source, decision.receivers) == (1, (0, 3))
    assert not decide(votes, 0).committed


def test_founders_take_the_state_of_the_first_of_them() -> None:
    votes = [Vote(NEWCOMER, 0, False, 10), Vote(FOUNDER, 0, False, 10), Vote(FOUNDER, 0, False, 10)]
    decision = decide(votes, 2)
    assert (decision.source, decision.receivers) == (1, (0, 2))
    assert (decision.committed, decision.done) == (False, 0)


def test_a_member_that_missed_a_rollback_takes_the_state_of_members_that_did_not() -> None:
    votes = [holder(6, True), Vote(HOLDER, 4, False, 10, rewinds=1), Vote(HOLDER, 4, False, 10, rewinds=1)]
    decisions = [decide(votes, rank) for rank in range(3)]
    assert [(v.committed, v.done, v.source, v.receivers) for v in decisions] == [(False, 4, 1, (0,))] * 3
    late = CommitState()
    late.standing, late.done, late.total = HOLDER, 6, 10
    late.settle(decisions[0])
    late.take_over(4)
    assert late.vote() == votes[1]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("rewinds", range(4))
def test_a_vote_arrives_as_the_numbers_that_it_was_sent_as(prepared: bool, rewinds: int) -> None:
    vote = Vote(HOLDER, 4, prepared, 10, rewinds)
    assert Vote.of(vote.numbers()) == vote and len(vote.numbers()) == FIELDS


def test_a_job_ends_when_no_member_has_the_state() -> None:
    with pytest.raises(HoldfastError, match="everybody who had it died"):
        decide([Vote(NEWCOMER, 0, False, 10)], 0)


def test_ranks_with_different_steps_are_refused() -> None:
    with pytest.raises(Mismatch, match="rank 1 was asked for 20 steps, rank 0 for 10"):
        decide([holder(4, False), Vote(HOLDER, 4, False, 20)], 0)
    stray = [holder(4, False), Vote(NEWCOMER, 0, False, 20)]
    with pytest.raises(Mismatch, match="rank 1 was asked for 20 steps"):
        decide(stray, 1)
    assert decide(stray, 0).receivers == (1,), "a newcomer that is wrong has to go, the others stay"
    for behind in (holder(4, False), holder(3, True)):
        with pytest.raises(Mismatch, match="come apart"):
            decide([behind, holder(5, False)], 0)


# -- times between commits


def test_a_recovery_takes_the_longest_time_between_two_commits_until_a_step_is_done_again() -> None:
    times, (one, two, three) = RecoveryTimes(), (view_of("h", epoch) for epoch in (1, 2, 3))
    assert [times.commit(now, one, step, True) for step, now in enumerate((0.0, 1.0, 3.0))] == [None] * 3
    assert times.commit(10.0, two, 3, False) is None, "found out by the rebuild"
    assert times.commit(14.0, two, 4, True) == RecoveryEnded(step=4, epoch=2, seconds=7.0, usual=1.5)
    assert times.commit(15.0, two, 5, True) is None
    assert times.commit(17.0, three, 6, True) == RecoveryEnded(step=6, epoch=3, seconds=2.0, usual=1.0)


def test_a_job_that_has_done_one_step_has_no_usual_time() -> None:
    times = RecoveryTimes()
    assert times.commit(1.0, view_of("h", 1), 0, True) is None
    assert times.commit(4.0, view_of("h", 2), 1, True) == RecoveryEnded(step=1, epoch=2, seconds=3.0, usual=None)
