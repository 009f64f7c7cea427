"""The end of a session: each of its parts is closed, whatever another part raises."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast import ft
from holdfast.comms import StaleEpoch
from holdfast.ft import Session, settings
from holdfast.ft.communicators import CommunicatorManager, DefaultGroup
from holdfast.ft.departure import TERMINATED, Terminated, TerminationRequest
from holdfast.ft.node.register import Register
from holdfast.ft.node.runtime import Runtime
from holdfast.ft.session import OwnSteps
from holdfast.ft.state.replicator import StateReplicator
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight.recorder import FlightRecorder
from holdfast.ft.telemetry.metrics import Metrics
from holdfast.harness import LocalCluster
from support.samples.tally import Tally, contract_in
from support.waiting import becomes_true


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

    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(CODE) else None)
    try:
        body()
    finally:
        sys.settrace(None)
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
        left = {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast")}
        assert not left


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


def work(session: Session, gate: Path) -> int | None:
    """Do steps until the file `gate` exists; returns the number of members."""
    for attempt in session.steps(10**6):
        with attempt:
            is_open = torch.tensor([float(gate.exists())])
            attempt.comm.all_reduce(is_open)
            time.sleep(0.01)
        if attempt.committed and is_open.item() == attempt.comm.size:
            break
    return session.size


def test_a_member_that_is_asked_to_leave_finishes_its_step_and_the_others_go_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with LocalCluster(3, "shm") as cluster, cluster.start(work, gate) as job:
        assert becomes_true(lambda: len([e for e in job.events() if e["kind"] == "committed"]) > 6, 60.0)
        leaver = job.pid(1)
        os.kill(leaver, signal.SIGTERM)
        assert becomes_true(lambda: len(job.view().members) == 2, 60.0)
        gate.touch()
        assert job.results() == [2, 2]
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
