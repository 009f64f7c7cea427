"""The reader of recoveries: from events to when a fault was known and each process went on."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.ft.events import Event
from holdfast.harness.bench.recovery import timing_of
from holdfast.harness.recovery import NotRecovered, recovery_of, wait_for_recovery
from holdfast.harness.simulate.compare import RecoveryMoments, moments_of
from support.event_records import an_event


def log(*lines: tuple[float, str, str, dict[str, Any]]) -> list[Event]:
    return [an_event(kind, who, at, **fields) for at, who, kind, fields in lines]


BEFORE = log(
    (1.0, "a", "installed", {"epoch": 4, "members": ["a", "b", "c"]}),
    (1.9, "a", "committed", {"epoch": 4, "step": 6}),
)
KILLED = log(
    (2.005, "b", "committed", {"epoch": 4, "step": 6}),  # of the view before
    (2.01, "b", "detected", {"members": ["c"]}),
    (2.02, "a", "detected", {"members": ["c"]}),
    (2.05, "b", "revoked", {"epoch": 4}),
    (2.1, "b", "installed", {"epoch": 5, "members": ["a", "b"]}),
    (2.3, "a", "installed", {"epoch": 5, "members": ["a", "b"]}),
    (2.34, "b", "rebuilt", {"epoch": 5}),
    (2.33, "a", "rebuilt", {"epoch": 5}),
    (2.35, "b", "committed", {"epoch": 5, "step": 7, "how": "recovered"}),  # complete before the fault
    (2.5, "b", "committed", {"epoch": 5, "step": 8}),
    (2.4, "a", "committed", {"epoch": 5, "step": 8}),
    (2.9, "a", "committed", {"epoch": 5, "step": 9}),
)


def test_each_process_has_its_first_moments_of_the_next_view() -> None:
    found = recovery_of(BEFORE + KILLED, 2.0, {"c"})
    assert found.over
    assert (found.detected, found.members) == (2.01, ("a", "b"))
    assert found.installed == {"a": 2.3, "b": 2.1}
    assert found.rebuilt == {"a": 2.33, "b": 2.34}
    assert found.resumed == {"a": 2.4, "b": 2.5}


def test_the_last_survivor_gives_the_times_of_the_comparison_and_of_the_bench() -> None:
    found = recovery_of(BEFORE + KILLED, 2.0, {"c"})
    assert moments_of(found) == RecoveryMoments(pytest.approx(0.3), pytest.approx(0.5))
    kill = timing_of(found, rank=2, gone=2.0015, survivors={"a", "b"})
    taken = (kill.rank, kill.gone, kill.detect, kill.agree, kill.rebuild, kill.total)
    assert taken == pytest.approx((2, 1.5, 10, 300, 340, 500))


def test_an_op_counts_from_when_it_was_complete_not_from_when_it_was_checked() -> None:
    reduced = log((2.6, "a", "first_op", {"epoch": 5, "rank": 0, "completed": 2.36}))
    assert recovery_of(KILLED[:8] + reduced, 2.0, {"c"}).resumed == {"a": 2.36}


def test_a_recovery_is_over_when_all_survivors_have_worked() -> None:
    found = recovery_of(BEFORE + KILLED[:-2], 2.0, {"c"})
    assert (found.over, found.late) == (False, ("a",))
    assert not recovery_of([], 2.0, {"c"}).over


def test_of_two_killed_at_once_the_second_may_be_in_a_view_without_the_first() -> None:
    between = log((2.06, "a", "installed", {"epoch": 5, "members": ["a", "b", "d"]}))
    assert recovery_of(between + KILLED, 2.0, {"c"}).members == ("a", "b", "d")
    assert recovery_of(between + KILLED, 2.0, {"c", "d"}).members == ("a", "b")


def test_a_newcomer_that_comes_later_does_not_belong_to_the_recovery() -> None:
    newcomer = log(
        (8.0, "e", "installed", {"epoch": 6, "members": ["a", "b", "e"]}), (8.1, "e", "rebuilt", {"epoch": 6})
    )
    found = recovery_of(BEFORE + KILLED + newcomer, 2.0, {"c"})
    assert (found.members, found.over) == (("a", "b"), True)


def test_a_fault_that_ends_no_epoch_has_the_next_commit_alone() -> None:
    """A spare dies; what ends an epoch later is another fault, and so is a copy that is made then."""
    spare = log((2.01, "a", "detected", {"members": ["spare"]}), (2.2, "a", "committed", {"step": 7}))
    later = log((3.1, "a", "revoked", {"epoch": 4}), (3.2, "a", "replica_made", {"version": 3}))
    found = recovery_of(BEFORE + spare + later, 2.0, until=3.0)
    assert (found.detected, found.replaced, found.members) == (2.01, None, ())
    assert found.resumed == {"a": 2.2}


def test_the_work_of_a_role_that_another_process_took_over() -> None:
    lost = log(
        (2.01, "driver", "process_lost", {"role": "driver"}),
        (2.1, "trainer", "committed", {"step": 7}),
        (4.0, "driver/2", "process_replaced", {"role": "driver"}),
        (4.5, "trainer/2", "committed", {"step": 7}),
    )
    found = recovery_of(lost, 2.0)
    assert (found.replaced, found.resumed) == (4.0, {"trainer/2": 4.5})


def test_waiting_for_a_recovery_that_does_not_come_says_who_is_late() -> None:
    reads = iter([BEFORE, BEFORE + KILLED])
    assert wait_for_recovery(lambda: next(reads), 2.0, {"c"}, limit=60.0, every=0.0).over
    with pytest.raises(NotRecovered, match="no next view began within 0 s of the loss of c"):
        wait_for_recovery(lambda: BEFORE, 2.0, {"c"}, limit=0.0, every=0.0)
    with pytest.raises(NotRecovered, match="members a did not work again"):
        wait_for_recovery(lambda: KILLED[:-2], 2.0, {"c"}, limit=0.0, every=0.0)
