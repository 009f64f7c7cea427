"""SIGTERM: a member finishes its step and leaves, and the others go on without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.ft import Session
from holdfast.ft.termination import TERMINATED, Terminated, TerminationRequest
from holdfast.harness import LocalCluster
from support.waiting import becomes_true


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


def test_a_forked_child_is_ended_as_ever(request_: TerminationRequest) -> None:
    request_.in_steps = True
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    request_.obey()


def test_a_session_that_ends_by_itself_delivers_the_signal_late() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        request = TerminationRequest()
        request.begin()
        request.in_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
        request.end()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


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
