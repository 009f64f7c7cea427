"""Callbacks of a work that is complete, and of a communicator that is aborted: each is called once, and never lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, HoldfastError, OpTimeout, PeerFailed, Revoked, Work
from holdfast.comms.ops import OpDescription
from holdfast.comms.plugins.spec import AbortEvent
from holdfast.harness import LocalCluster


@pytest.fixture
def comm(tmp_path: Path) -> Iterator[Communicator]:
    with comms.connect("shm", rank=0, size=1, rendezvous=f"file://{tmp_path}/meeting") as made:
        yield made


class Gate:
    """An asynchronous op that runs until `open`."""

    def __init__(self, comm: Communicator) -> None:
        self._go, self._begun = threading.Event(), threading.Event()
        self.work: Work = comm._executor.issue(OpDescription("gated", 0, False), lambda: self._wait, True, None)
        assert self._begun.wait(20.0)

    def _wait(self, deadline: float) -> None:
        self._begun.set()
        assert self._go.wait(20.0)

    def open(self) -> None:
        self._go.set()
        self.work.wait()


def test_the_thread_that_completes_a_work_calls_back(comm: Communicator) -> None:
    gate, calls = Gate(comm), list[tuple[Work, bool, str]]()
    called = threading.Event()
    for _ in range(2):
        gate.work.add_done_callback(lambda work: calls.append((work, work.done(), threading.current_thread().name)))
    gate.work.add_done_callback(lambda work: called.set())
    assert not calls
    gate.open()
    assert called.wait(20.0)
    assert calls == [(gate.work, True, f"holdfast-ops-{comm.name}")] * 2


def test_a_work_that_is_done_calls_back_at_once(comm: Communicator) -> None:
    calls: list[tuple[Work, threading.Thread]] = []
    works = [comm.all_reduce(torch.ones(2)), comm.all_reduce(torch.ones(2), async_op=True)]
    for work in works:
        work.wait()
        work.add_done_callback(lambda work: calls.append((work, threading.current_thread())))
    assert calls == [(work, threading.current_thread()) for work in works]


def test_a_callback_learns_of_a_failure(comm: Communicator) -> None:
    def fail(deadline: float) -> None:
        raise PeerFailed((0,), "for this test")

    gate, errors, called = Gate(comm), list[BaseException | None](), threading.Event()
    failing = comm._executor.issue(OpDescription("failing", 0, False), lambda: fail, True, None)
    failing.add_done_callback(lambda work: errors.append(work.exception()))
    failing.add_done_callback(lambda work: called.set())
    gate.open()
    assert called.wait(20.0) and isinstance(errors[0], PeerFailed)


def test_what_a_callback_raises_is_logged_and_keeps_no_other_from_its_call(
    comm: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    def exits(argument: object) -> None:
        raise SystemExit("for this test")

    gate, called = Gate(comm), threading.Event()
    gate.work.add_done_callback(exits)
    gate.work.add_done_callback(lambda work: called.set())
    with caplog.at_level(logging.ERROR, "holdfast.comms"):
        gate.open()
        assert called.wait(20.0)
        comm.all_reduce(torch.ones(2), async_op=True).wait()  # the worker goes on
        comm.hooks.on_abort(exits)
        comm.abort("for this test")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [SystemExit, SystemExit]


def test_a_callback_is_called_once_when_work_and_caller_race() -> None:
    for _ in range(300):
        work, calls, start = Work("op"), list[Work](), threading.Barrier(3)

        def complete(work: Work = work, start: threading.Barrier = start) -> None:
            start.wait()
            work.run(lambda: None)

        def add(work: Work = work, start: threading.Barrier = start, calls: list[Work] = calls) -> None:
            start.wait()
            work.add_done_callback(calls.append)

        threads = [threading.Thread(target=target) for target in (complete, add, add)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls == [work, work]


def test_an_abort_calls_back_once_with_the_first_reason(comm: Communicator) -> None:
    reasons: list[str] = []

    def again(event: AbortEvent) -> None:
        reasons.append(str(event.error))
        comm.abort("from a hook")
        comm.hooks.on_abort(lambda late: reasons.append(f"late: {late.error}"))

    comm.hooks.on_abort(again)
    comm.abort("the first")
    comm.abort("the second")
    comm.close()
    first = f"{comm.over}"
    assert "the first" in first and reasons == [first, f"late: {first}"]


def test_an_abort_callback_may_wait_for_a_thread_that_aborts(comm: Communicator) -> None:
    def abort_in_a_thread(event: AbortEvent) -> None:
        thread = threading.Thread(target=comm.abort)
        thread.start()
        thread.join(20.0)
        ended.append(not thread.is_alive())

    ended: list[bool] = []
    part = comm.split([0])
    for each in (comm, part):
        each.hooks.on_abort(abort_in_a_thread)
    comm.abort()
    part.close()
    assert ended == [True, True]


def test_a_close_is_no_abort(comm: Communicator) -> None:
    ends: list[AbortEvent] = []
    comm.hooks.on_abort(ends.append)
    comm.close()
    comm.abort()
    comm.hooks.on_abort(ends.append)
    assert ends == []


def test_a_failed_op_and_the_end_of_the_whole_call_back() -> None:
    def body(comm: Communicator) -> list[str]:
        ends: list[AbortEvent] = []
        with comm.split([0, 1]) as part:
            for each in (comm, part):
                each.hooks.on_abort(ends.append)
            if comm.rank == 0:
                with pytest.raises(OpTimeout):
                    comm.barrier(timeout=0.2)
            else:
                with pytest.raises(HoldfastError):
                    comm.recv(torch.empty(1), 0)
            return [type(end.error).__name__ for end in ends]

    with LocalCluster(2, "inproc") as cluster:
        assert cluster.run(body) == [[Revoked.__name__] * 2] * 2
