"""`Liveness`: a wait ends at every death of a peer process, whenever it happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import (
    Liveness,
    is_exiting,
    start_time,
    stopped_ranks,
    this_host,
    this_process,
)
from support.waiting import eventually


@pytest.fixture
def wake() -> Iterator[OwnedDescriptor]:
    fd = OwnedDescriptor(os.eventfd(0, os.EFD_CLOEXEC))
    yield fd
    fd.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as each:
        yield each
        each.kill()


def peer_of(process: subprocess.Popen[bytes]) -> Peer:
    return Peer(this_host(), process.pid, start_time(process.pid))


@pytest.fixture
def liveness(process: subprocess.Popen[bytes]) -> Iterator[Liveness]:
    """That of this process, rank 0, and of `process`, rank 1."""
    with contextlib.closing(Liveness([this_process(), peer_of(process)], 0)) as made:
        yield made


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_process_that_exits_counts_as_dead_before_the_kernel_has_freed_its_memory(
    process: subprocess.Popen[bytes], liveness: Liveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not liveness.is_ending(1)
    monkeypatch.setattr("holdfast.comms.transport.liveness.is_exiting", lambda pid: pid == process.pid)
    eventually(lambda: liveness.is_ending(1))  # it looks once a millisecond
    assert liveness.dead() == (1,), "for good, and for all waits"
    with contextlib.closing(Liveness([this_process(), Peer("elsewhere", process.pid, 1)], 0)) as elsewhere:
        assert not elsewhere.is_ending(1), "the number is another process's there"


def test_a_process_is_exiting_from_its_sigkill_on(process: subprocess.Popen[bytes]) -> None:
    assert not is_exiting(process.pid)
    process.kill()
    eventually(lambda: is_exiting(process.pid))
    process.wait()
    assert is_exiting(process.pid)


@pytest.mark.parametrize("when", ["before it was made", "before the first wait", "while somebody waits"])
def test_a_death_ends_a_wait(process: subprocess.Popen[bytes], wake: OwnedDescriptor, when: str) -> None:
    peer = peer_of(process)
    if when == "before it was made":
        end(process)
    liveness = Liveness([this_process(), peer], 0)
    if when == "before the first wait":
        end(process)
    if when == "while somebody waits":
        threading.Timer(0.05, process.kill).start()
    alarm = threading.Timer(10.0, os.eventfd_write, (wake, 1))
    alarm.start()
    assert liveness.wait(wake), "the death ended the wait, not the alarm"
    alarm.cancel()
    assert liveness.dead() == (1,)
    assert liveness.wait(wake, 0.01), "a death ends one wait only: this one ends by its timeout"
    liveness.close()


def test_a_wake_up_ends_a_wait(liveness: Liveness, wake: OwnedDescriptor) -> None:
    os.eventfd_write(wake, 1)
    assert not liveness.wait(wake)
    assert liveness.dead() == ()


def test_threads_may_call_dead_while_another_thread_waits(
    process: subprocess.Popen[bytes], liveness: Liveness, wake: OwnedDescriptor
) -> None:
    asked = threading.Barrier(9, timeout=10.0)

    def ask() -> tuple[int, ...]:
        for _ in range(1000):
            assert liveness.dead() == ()
        asked.wait()
        while not (dead := liveness.dead()):
            pass
        return dead

    with ThreadPoolExecutor(9) as threads:
        waited = threads.submit(liveness.wait, wake, 10.0)
        answers = [threads.submit(ask) for _ in range(8)]
        with contextlib.suppress(threading.BrokenBarrierError):
            asked.wait()
        process.kill()
        assert [answer.result() for answer in answers] == [(1,)] * 8
        assert waited.result()


def test_a_recycled_pid_counts_as_a_death(process: subprocess.Popen[bytes], wake: OwnedDescriptor) -> None:
    now = peer_of(process)
    with contextlib.closing(Liveness([this_process(), Peer(now.host, now.pid, now.started - 1)], 0)) as liveness:
        assert liveness.dead() == (1,)
        assert liveness.wait(wake), "although `dead` returned it before"


def test_processes_of_other_hosts_are_not_watched(wake: OwnedDescriptor) -> None:
    with contextlib.closing(Liveness([this_process(), Peer("elsewhere", 1, 1)], 0)) as liveness:
        assert liveness.wait(wake, 0.01)
        assert liveness.dead() == ()


def test_stopped_processes_are_found_among_the_other_processes_of_this_host(process: subprocess.Popen[bytes]) -> None:
    elsewhere = Peer("another host", process.pid, start_time(process.pid))
    peers = [this_process(), elsewhere, peer_of(process)]
    assert stopped_ranks(peers) == ()
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert stopped_ranks(peers) == (2,)
    end(process)
    assert stopped_ranks(peers) == ()
