"""Exceptions of a user's code: the first costs a spare, a repeated one ends the job.

Also jobs that all ranks leave early.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.ft import AlreadyJoined, Session, StepFailed
from holdfast.ft.departure import note_error, step_error
from holdfast.ft.event_lines import event_of
from holdfast.ft.node.register import Register
from holdfast.harness import LocalCluster
from holdfast.harness.invariants import check
from support.children import errors_of
from support.samples.tally import QUICK, contract_in, start_with_spares


def fails(session: Session, gate: str = "", once: str = "") -> int:
    """Steps; rank 1 raises in step 5.

    It raises only once if there is a file `once` to record that.
    """
    for attempt in session.steps(10):
        with attempt:
            while gate and attempt.step == 3 and not Path(gate).exists():
                time.sleep(0.005)
            if attempt.step == 5 and attempt.rank == 1 and not (once and Path(once).exists()):
                if once:
                    Path(once).touch()
                raise ValueError("a bad batch")
            attempt.comm.barrier()
    return session.step


def test_an_exception_that_is_not_repeated_costs_only_a_spare() -> None:
    with LocalCluster(2, spares=1, session={"timeouts": QUICK}) as ranks:
        job = start_with_spares(ranks, fails, once=str(ranks.logs / "once"))
        assert job.results() == [10, 10]
        (left, *_) = [event["evidence"] for event in job.events() if event["kind"] == "detected"]
    assert "it left: ValueError" in left


def test_a_repeated_exception_ends_the_job_on_all_ranks_and_consumes_one_spare() -> None:
    with LocalCluster(2, spares=3, session={"timeouts": QUICK}) as ranks:
        job = start_with_spares(ranks, fails)
        with pytest.raises(ValueError, match="a bad batch"):
            job.results()
        errors = errors_of(job, job.processes)
        view = job.newest_view()
        assert check([event_of(event) for event in job.events()]) == []
    assert view is not None and view.phase == "failed"
    assert sum(isinstance(error, ValueError) for error in errors) == 2, "one more spare would have been no help"
    told = [error for error in errors if isinstance(error, StepFailed)]
    assert len(told) == 3, "the survivor and the spares that were not needed"
    for error in told:
        assert (error.error.step, error.error.rank, error.error.kind) == (5, 1, "ValueError")
        assert "the same exception came again: ValueError: a bad batch (step 5, rank 1" in str(error)
        assert "test_user_errors.py" in error.error.place


def test_the_first_exception_ends_a_job_with_on_error_raise() -> None:
    with LocalCluster(3, session={"timeouts": QUICK, "on_error": "raise"}) as ranks:
        job = ranks.start(fails)
        with pytest.raises(ValueError, match="a bad batch"):
            job.results()
        errors = errors_of(job, job.processes)
    assert sorted(type(error).__name__ for error in errors) == ["StepFailed", "StepFailed", "ValueError"]


def test_an_exception_on_all_ranks_ends_the_job_at_once() -> None:
    def fail(session: Session) -> None:
        for attempt in session.steps(4):
            with attempt:
                attempt.comm.barrier()
                if attempt.step == 2:
                    raise KeyError("everywhere")

    with LocalCluster(3, session={"timeouts": replace(QUICK, join=60.0), "min_size": 3}) as ranks:
        began = time.monotonic()
        job = ranks.start(fail)
        errors = errors_of(job, job.processes)
        assert time.monotonic() - began < 30, "nobody waits for members that cannot come"
    assert {type(error) for error in errors} <= {KeyError, StepFailed}
    assert KeyError in map(type, errors)


def test_an_exception_is_a_repeat_if_type_message_place_and_step_are_the_same(tmp_path: Path) -> None:
    def caught(words: str, kind: type[Exception] = ValueError) -> Exception:
        try:
            raise kind(words)
        except Exception as error:
            return error

    register = f"sqlite://{tmp_path}/job.sqlite"
    with Register.open(register):
        assert not note_error(register, step_error(caught("x"), 3, 0))
        assert not note_error(register, step_error(caught("y"), 3, 0))
        assert not note_error(register, step_error(caught("x"), 5, 0)), "in a later step"
        assert not note_error(register, step_error(caught("x", KeyError), 3, 0))
        assert not note_error(register, step_error(ValueError("x"), 3, 0)), "raised elsewhere"
        assert note_error(register, step_error(caught("x"), 3, 1)), "on whatever rank"
        assert note_error(register, step_error(caught("x"), 4, 1)), "its step was committed without it"
        assert not note_error(register, step_error(caught("\ud800" + "long" * 1000), 3, 1))
        assert note_error(register, step_error(caught("\ud800" + "long" * 1000), 3, 1))


# -- stopping early


def stops(session: Session, at: int, only: int = -1, late: float = 0.0) -> int:
    for attempt in session.steps(10):
        with attempt:
            attempt.comm.barrier()
        if attempt.step == at and only in (-1, attempt.rank):
            break
    time.sleep(late * (session.rank or 0))
    return session.step


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_all_ranks_may_leave_the_steps_early(backend: str) -> None:
    with LocalCluster(3, backend, spares=1, session={"timeouts": QUICK}) as ranks:
        job = ranks.start(stops, 4, late=0.4)
        assert job.results() == [5, 5, 5]
        assert errors_of(job, job.processes) == [None] * 4, "the spare is let go too"
        view = job.newest_view()
        assert check([event_of(event) for event in job.events()]) == []
    assert view is not None
    assert (view.phase, view.reason) == ("finished", "all members stopped after 5 of 10 steps")


def test_the_job_continues_at_once_without_a_rank_that_alone_leaves_the_steps() -> None:
    with LocalCluster(3, session={"timeouts": QUICK}) as ranks:
        job = ranks.start(stops, 4, only=2)
        assert job.results() == [10, 10]
        events = job.events()
    committed = [event["time"] for event in events if event["kind"] == "committed"]
    assert max(b - a for a, b in pairwise(committed)) < QUICK.operation / 2


def test_a_rank_that_dies_while_all_stop_does_not_delay_the_others() -> None:
    with LocalCluster(3, session={"timeouts": QUICK}) as ranks:
        job = ranks.start(stops, 4, late=0.7)
        job.wait_for("committed", step=4)
        job.kill(2)
        assert job.results() == [5, 5]


# -- one session of a job in a process


def test_a_second_session_of_a_job_in_one_process_is_refused_at_once(tmp_path: Path) -> None:
    contract = contract_in(tmp_path, timeouts=QUICK)
    early = Session(**contract)
    with Session(**contract):
        with pytest.raises(AlreadyJoined, match="a session of job 'job' open already"):
            Session(**contract)
        with pytest.raises(AlreadyJoined), early:
            pass
    with Session(**contract, size=1) as session:
        assert session.rank is None
