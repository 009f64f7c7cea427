"""The end of a session: by closing, a signal's handler, SIGTERM, an exception of the user, or by leaving early."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast import ft
from holdfast.comms import StaleEpoch
from holdfast.ft import AlreadyJoined, Session, StepFailed, settings
from holdfast.ft.communicators import CommunicatorManager, DefaultGroup
from holdfast.ft.departure import TERMINATED, Terminated, TerminationRequest, note_error, step_error
from holdfast.ft.node.epoch_guard import EpochGuard
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import Runtime
from holdfast.ft.session import OwnSteps
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.telemetry import flight
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight.recorder import FlightRecorder
from holdfast.ft.telemetry.metrics import Metrics
from support.children import errors_of
from support.samples.tally import (
    QUICK,
    Tally,
    assert_exact,
    assert_invariants,
    cluster,
    contract_in,
    start_with_spares,
    tally_up,
)
from support.views import view_of
from support.waiting import PROGRAM_SECONDS, eventually, once_it_waits


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    return contract_in(tmp_path, size=1)


CLOSES = [
    (ft.Session, "_ends_job"),
    (DefaultGroup, "drop"),
    (StateReplicator, "close"),
    (CommunicatorManager, "close"),
    (Runtime, "close"),
    (Register, "close"),
    (FlightRecorder, "close"),
    (Metrics, "close"),
    (EventLog, "close"),
    (TerminationRequest, "end"),
]


def _open_here() -> tuple[set[threading.Thread], int]:
    """The threads of holdfast in this process, and the number of its descriptors."""
    ours = {thread for thread in threading.enumerate() if thread.name.startswith("holdfast")}
    return ours, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("owner, name", CLOSES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_part_that_cannot_be_closed_keeps_no_other_open(
    owner: type, name: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path))
    closed: set[tuple[type, str]] = set()

    def record(part: type, method: str) -> None:
        close = getattr(part, method)

        def recorded(self: object, *given: object) -> object:
            closed.add((part, method))
            done = close(self, *given)
            if (part, method) == (owner, name) and before is not None:
                raise OSError("it cannot be closed")
            return done

        monkeypatch.setattr(part, method, recorded)

    before = None
    for part, method in CLOSES:
        record(part, method)
    session, before = ft.Session(**arguments, metrics=0), _open_here()
    closed.clear()
    with pytest.raises(OSError, match="it cannot be closed"), session:
        next(session.steps(2))  # it leaves before the last step
    assert closed == set(CLOSES)
    assert _open_here() == before
    settings.check_single(session._settings)  # the next session of the job may open


def test_a_session_that_cannot_begin_leaves_nothing_open(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, before = ft.Session(**arguments), _open_here()

    def refuse(*given: object) -> None:
        raise OSError("no thread can be started")

    monkeypatch.setattr(Runtime, "__init__", refuse)
    with pytest.raises(OSError, match="no thread"), session:
        pass
    assert _open_here() == before
    settings.check_single(session._settings)


# -- a signal's handler ends a session at any point of its code


CODE = str(Path(ft.__file__).parent.parent), threading.__file__, sys.modules["contextlib"].__file__ or ""


def call_at_line(number: int, handler: Callable[[], None], body: Callable[[], None]) -> int:
    """Run `body()`, and `handler()` at the start of its `number`th line, as that of a signal; the number of lines."""
    lines = 0

    def at_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == number:
            handler()
        return at_line

    before = sys.gettrace()  # that of coverage
    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(CODE) else None)
    try:
        body()
    finally:
        sys.settrace(before)
    return lines


def run(folder: Path, number: int) -> int:
    """A whole job of one member, whose session is ended at a line; the number of lines of its code."""
    session = ft.Session(**contract_in(folder, size=1, register=f"sqlite://{folder}/{number}.sqlite"))

    def job() -> None:
        session.attach("state", Tally())
        with session:
            for attempt in session.steps(2):
                with attempt:
                    attempt.comm.all_reduce(torch.ones(3))

    try:
        return call_at_line(number, lambda: session.__exit__(None, None, None), job)
    except StaleEpoch as error:
        assert "its session was closed" in str(error)
        return 0


@pytest.mark.parametrize("points", [12, pytest.param(400, marks=pytest.mark.thorough)])
@pytest.mark.timeout(600)
def test_a_handler_ends_a_session_at_any_line_of_its_code(points: int, tmp_path: Path) -> None:
    """The rest of the job runs to its end or is told that the session was closed, and nothing is left behind."""
    before = set(threading.enumerate())
    total = run(tmp_path, 0)
    assert total > 1000
    for point in range(points):
        run(tmp_path, 1 + total * point // points)
        eventually(lambda: not [each for each in {*threading.enumerate()} - before if each.name.startswith("holdfast")])


@pytest.mark.parametrize("wait", [EpochGuard.wait, EpochGuard.wait_over])
def test_a_handler_ends_a_wait_for_the_next_epoch_at_any_line(wait: Callable[..., object]) -> None:
    """One that came between the look and the wait was not noticed before the timeout."""
    began, line, reached = time.monotonic(), 0, True
    while reached:
        line, reached = line + 1, False
        guard = EpochGuard()
        guard.install(view_of(["a"], epoch=1))

        def end() -> None:
            nonlocal reached
            reached = True
            guard.end(StaleEpoch("its session was closed"))  # noqa: B023 (the guard of this turn)

        def work() -> None:
            with contextlib.suppress(StaleEpoch):
                wait(guard, 1, PROGRAM_SECONDS)  # noqa: B023

        with once_it_waits(lambda: reached or guard.end(StaleEpoch("by another thread"))):  # noqa: B023
            call_at_line(line, end, work)
    assert line > 10
    assert time.monotonic() - began < PROGRAM_SECONDS


def test_what_a_handler_asks_for_amid_own_steps_is_done_right_after() -> None:
    steps, done = OwnSteps(), list[str]()
    with steps:
        with steps:
            assert steps.interrupted
            steps.do_after(lambda: done.append("close"))
        done.append("outer steps")
        others = threading.Thread(target=lambda: done.append(f"interrupted elsewhere: {steps.interrupted}"))
        others.start()
        others.join()
    assert done == ["outer steps", "interrupted elsewhere: False", "close"] and not steps.interrupted


# -- SIGTERM: a member finishes its step and leaves, and the others go on without it


@pytest.fixture
def request_() -> Iterator[TerminationRequest]:
    """A request that has taken over SIGTERM, which had no handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = TerminationRequest()
    request.begin()
    yield request
    request.end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def test_outside_of_a_step_a_process_leaves_at_once(request_: TerminationRequest) -> None:
    request_.obey()
    with pytest.raises(Terminated, match="SIGTERM asked this process to leave") as left:
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == TERMINATED == 143


def test_inside_a_step_it_leaves_after_it(request_: TerminationRequest) -> None:
    request_.in_steps = True
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the second one ends the process"
    with pytest.raises(Terminated):
        request_.obey()


@pytest.mark.parametrize("own", [False, True])
def test_a_forked_child_is_ended_as_ever_and_a_session_that_ends_delivers_the_signal_late(
    request_: TerminationRequest, own: bool
) -> None:
    request_.in_steps = True
    child = os.fork()
    if child == 0:
        request = TerminationRequest()
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            request.begin()
            request.in_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
        if own:
            request.end()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    request_.obey()


def test_a_handler_of_the_program_stays(request_: TerminationRequest) -> None:
    request_.end()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    another = TerminationRequest()
    another.begin()
    another.end()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_member_that_is_asked_to_leave_finishes_its_step_and_the_others_go_on() -> None:
    with cluster(3) as ranks:
        hurry = ranks.logs / "hurry"
        job = ranks.start(tally_up, 250, 0.05, hurry=str(hurry))
        job.wait_for("committed", step=2)
        leaver = job.pid(1)
        os.kill(leaver, signal.SIGTERM)
        job.wait_for("rebuilt", size=2)
        hurry.touch()
        assert_exact(job, job.results(), 2, 250)
        story = job.events()
    mine = [event for event in story if event["pid"] == leaver]
    assert [event["error"] for event in mine if event["kind"] == "error"] == [
        "Terminated: SIGTERM asked this process to leave"
    ]
    assert not [event for event in mine if event["kind"] in ("evicted", "aborted_step")]
    assert not [event for event in story if event["kind"] == "suspected"]
    last = max(event["step"] for event in mine if event["kind"] == "committed")
    begun = max(event["step"] for event in mine if event["kind"] == "attempt")
    assert begun == last, "it has finished what it had begun"
    reasons = [event["reason"] for event in story if event["kind"] == "installed" and len(event["members"]) == 2]
    assert reasons and all("SIGTERM asked this process to leave" in reason for reason in reasons)


# -- exceptions of a user's code: the first costs a spare, a repeated one ends the job


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
    with cluster(2, spares=1) as ranks:
        job = start_with_spares(ranks, fails, once=str(ranks.logs / "once"))
        assert job.results() == [10, 10]
        (left, *_) = [event["evidence"] for event in job.events() if event["kind"] == "detected"]
    assert "it left: ValueError" in left


def test_a_repeated_exception_ends_the_job_on_all_ranks_and_consumes_one_spare() -> None:
    with cluster(2, spares=3) as ranks:
        job = start_with_spares(ranks, fails)
        with pytest.raises(ValueError, match="a bad batch"):
            job.results()
        errors = errors_of(job, job.processes)
        view = job.newest_view()
        assert_invariants(job.events())
    assert view is not None and view.phase == "failed"
    assert sum(isinstance(error, ValueError) for error in errors) == 2, "one more spare would have been no help"
    told = [error for error in errors if isinstance(error, StepFailed)]
    assert len(told) == 3, "the survivor and the spares that were not needed"
    for error in told:
        assert (error.error.step, error.error.rank, error.error.kind) == (5, 1, "ValueError")
        assert "the same exception came again: ValueError: a bad batch (step 5, rank 1" in str(error)
        assert "test_closing.py" in error.error.place


def test_the_first_exception_ends_a_job_with_on_error_raise() -> None:
    with cluster(3, on_error="raise") as ranks:
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

    with cluster(3, timeouts=replace(QUICK, join=60.0), min_size=3) as ranks:
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


def test_an_exception_whose_text_is_no_valid_unicode_leaves_the_session_as_it_is_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python so names files whose names are no UTF-8. A communicator that it leaves is aborted with it, too."""
    monkeypatch.setenv("HOLDFAST_LOG_DIR", str(tmp_path / "logs"))
    with (
        pytest.raises(ValueError, match="no file a\udcff"),
        Session(**contract_in(tmp_path, timeouts=QUICK), size=1) as session,
    ):
        for attempt in session.steps(2):
            with attempt, attempt.comm.split([0]):
                raise ValueError("no file a\udcff")
    events = [json.loads(line) for log in (tmp_path / "logs").glob("*.jsonl") for line in log.open()]
    assert [event["error"] for event in events if event["kind"] == "error"] == ["ValueError: no file a?"]
    (recording,) = flight.find(tmp_path / "logs")
    assert flight.read(recording).note == "ValueError: no file a?"


# -- stopping early


def stops(session: Session, at: int, only: int = -1, late: float = 0.0, gate: str = "", last: str = "") -> int:
    for attempt in session.steps(10):
        with attempt:
            while gate and attempt.step == at and not Path(gate).exists():
                time.sleep(0.005)
            attempt.comm.barrier()
            while last and attempt.step == at and attempt.rank == 2 and not Path(last).exists():
                time.sleep(0.005)
        if attempt.step == at and only in (-1, attempt.rank):
            break
    time.sleep(late * (session.rank or 0))
    return session.step


@pytest.mark.parametrize(("fault", "done"), [("", [5, 5, 5]), ("commit.before_barrier:4:2:3", [5, 5, 0])])
def test_all_ranks_may_leave_the_steps_early(fault: str, done: list[int]) -> None:
    """Also if rank 2 dies in the last step that is done: the spare that takes its place has no state, and does none."""
    with cluster(3, spares=1, fault=fault, min_size=2) as ranks:
        last = ranks.logs / "last"
        job = start_with_spares(ranks, stops, 4, late=0.0 if fault else 0.4, last=str(last))
        eventually(lambda: [e["step"] for e in job.events() if e["kind"] == "prepared"].count(4) == 2)
        last.touch()  # rank 2 dies when the others have all results of the step
        assert job.results() == done
        assert errors_of(job, job.processes) == [None] * 4, "the spare is let go too"
        view = job.newest_view()
        assert_invariants(job.events())
    assert view is not None
    assert (view.phase, view.reason) == ("finished", "all members stopped after 5 of 10 steps")


def test_the_job_continues_at_once_without_a_rank_that_alone_leaves_the_steps() -> None:
    with cluster(3) as ranks:
        job = ranks.start(stops, 4, only=2)
        assert job.results() == [10, 10]
        events = job.events()
    committed = [event["time"] for event in events if event["kind"] == "committed"]
    assert max(b - a for a, b in pairwise(committed)) < QUICK.operation / 2


def test_a_rank_that_dies_while_all_stop_does_not_delay_the_others() -> None:
    with cluster(3) as ranks:
        job = ranks.start(stops, 4, late=0.7)
        job.wait_for("committed", step=4)
        job.kill(2)
        assert job.results() == [5, 5]
        times = [event["time"] for event in job.events()]
    assert max(b - a for a, b in pairwise(times)) < QUICK.operation / 2


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
