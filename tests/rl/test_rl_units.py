"""The work queue and the replay buffer: nothing is lost, counted twice, or stale."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.comms.errors import Mismatch
from holdfast.rl.learning.recipe import Recipe
from holdfast.rl.roles.buffer import ReplayBuffer, StaleUnit
from holdfast.rl.units import Ledger, Unit

RECIPE = Recipe(steps=6, units=3, lag=1, evaluate_every=2)


def test_publishing_a_version_opens_the_units_that_need_it() -> None:
    ledger = Ledger(RECIPE)
    opened = ledger.publish(0)
    assert {(unit.step, unit.number) for unit in opened if unit.kind == "generate"} == {
        (step, number) for step in (0, 1) for number in range(3)
    }
    assert [unit.version for unit in opened if unit.kind == "evaluate"] == [0]
    assert ledger.publish(0) == ()
    assert {unit.step for unit in ledger.publish(1) if unit.kind == "generate"} == {2}


def test_versions_that_were_skipped_open_their_units_too() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    assert {unit.version for unit in ledger.publish(3)} == {1, 2, 3}


def test_units_are_leased_in_the_order_of_their_version() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(1)
    leased = [ledger.lease("g", 0.0) for _ in range(10)]
    assert leased == sorted(unit for unit in leased if unit is not None)
    assert ledger.lease("g", 0.0) is None


def test_units_of_a_dead_worker_are_the_next_to_be_leased() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    first = ledger.lease("dies", 0.0)
    ledger.lease("lives", 0.0)
    assert ledger.release("dies") == (first,)
    assert ledger.lease("lives", 0.0) == first


def test_nothing_is_leased_to_a_worker_that_is_gone() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    ledger.release("dies")
    assert ledger.lease("dies", 0.0) is None
    assert ledger.lease("lives", 0.0) is not None


def test_a_result_counts_once_from_any_worker() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    unit = ledger.lease("slow", 0.0)
    assert unit is not None
    ledger.release("slow")
    assert ledger.lease("fast", 0.0) == unit
    assert ledger.complete(unit)
    assert not ledger.complete(unit)
    assert ledger.leases == ()


def test_a_result_for_a_unit_that_waits_takes_it_off_the_queue() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    unit = ledger.lease("dead", 0.0)
    assert unit is not None
    ledger.release("dead")
    assert ledger.complete(unit)
    assert ledger.lease("other", 0.0) != unit


def test_old_leases_are_overdue() -> None:
    ledger = Ledger(RECIPE)
    ledger.publish(0)
    ledger.lease("a", 1.0)
    ledger.lease("b", 2.0)
    assert [lease.worker for lease in ledger.overdue(1.5)] == ["a"]


class Generation(RuleBasedStateMachine):
    """Workers take units, bring results, and die, in any order; versions come."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger(RECIPE)
        self.opened: set[Unit] = set()
        self.held: dict[str, list[Unit]] = {"a": [], "b": [], "c": []}
        self.counted: list[Unit] = []
        self.version = 0
        self.opened.update(self.ledger.publish(0))

    @precondition(lambda self: self.version < RECIPE.steps)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.opened.update(self.ledger.publish(self.version))

    @rule(worker=st.sampled_from("abc"))
    def lease(self, worker: str) -> None:
        unit = self.ledger.lease(worker, 0.0)
        if unit is not None:
            self.held[worker].append(unit)

    @rule(worker=st.sampled_from("abc"), late=st.booleans())
    def bring(self, worker: str, late: bool) -> None:
        if self.held[worker]:
            unit = self.held[worker][-1] if late else self.held[worker].pop()
            if self.ledger.complete(unit):
                self.counted.append(unit)

    @rule(worker=st.sampled_from("abc"))
    def die(self, worker: str) -> None:
        self.ledger.release(worker)
        self.held[worker] = []

    @invariant()
    def each_unit_is_open_or_counted_once(self) -> None:
        assert len(set(self.counted)) == len(self.counted)
        assert self.ledger.open == self.opened - set(self.counted)

    @invariant()
    def a_unit_is_in_one_hand(self) -> None:
        leased = [lease.unit for lease in self.ledger.leases]
        assert len(set(leased)) == len(leased)
        assert set(leased) <= self.ledger.open

    def teardown(self) -> None:
        for worker in "abc":
            self.ledger.release(worker)
        while (unit := self.ledger.lease("last", 0.0)) is not None:
            assert self.ledger.complete(unit)
            self.counted.append(unit)
        assert set(self.counted) == self.opened


TestGeneration = Generation.TestCase
TestGeneration.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def unit(step: int, number: int, version: int | None = None) -> Unit:
    return Unit(RECIPE.version(step) if version is None else version, step, number, "generate")


def test_a_step_is_taken_once_all_of_it_is_there_and_as_often_as_it_is_tried() -> None:
    buffer = ReplayBuffer(RECIPE)
    buffer.put(unit(0, 0), b"zero")
    assert buffer.take(0, (0, 1)) is None
    buffer.put(unit(0, 1), b"one")
    assert buffer.take(0, (1, 0)) == (b"one", b"zero")
    assert buffer.take(0, (1, 0)) == (b"one", b"zero")
    assert buffer.take(0, ()) == ()


def test_samples_of_a_committed_step_are_gone_and_not_wanted() -> None:
    buffer = ReplayBuffer(RECIPE)
    buffer.put(unit(0, 0), b"zero")
    buffer.put(unit(1, 0), b"one")
    buffer.commit(1)
    assert len(buffer) == 1
    assert not buffer.put(unit(0, 0), b"zero")
    with pytest.raises(ValueError, match="step 0 is committed"):
        buffer.take(0, (0,))
    buffer.commit(0)
    assert buffer.committed == 1


def test_the_same_samples_twice_count_once_and_other_samples_are_refused() -> None:
    buffer = ReplayBuffer(RECIPE)
    assert buffer.put(unit(2, 0), b"x")
    assert not buffer.put(unit(2, 0), b"x")
    with pytest.raises(Mismatch, match="unit 0 of step 2"):
        buffer.put(unit(2, 0), b"y")
    assert buffer.take(2, (0,)) == (b"x",)


@pytest.mark.parametrize("version", [0, 2, 3])
def test_samples_of_other_weights_than_the_steps_are_stale(version: int) -> None:
    buffer = ReplayBuffer(RECIPE)
    with pytest.raises(StaleUnit, match="must be with 1"):
        buffer.put(unit(2, 0, version), b"x")
    assert len(buffer) == 0


@pytest.mark.parametrize(("step", "number"), [(-1, 0), (6, 0), (0, 3), (0, -1)])
def test_a_unit_that_the_run_does_not_have_is_refused(step: int, number: int) -> None:
    with pytest.raises(ValueError, match="no unit"):
        ReplayBuffer(RECIPE).put(Unit(0, step, number, "generate"), b"")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_every_step_has_one_version_and_is_never_staler_than_the_lag(lag: int) -> None:
    recipe = Recipe(steps=9, lag=lag)
    steps = [step for version in range(recipe.steps + 1) for step in recipe.steps_with(version)]
    assert steps == list(range(9))
    for step in steps:
        assert 0 <= step - recipe.version(step) <= lag
