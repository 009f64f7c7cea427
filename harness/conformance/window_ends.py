"""Checks of windows with a silent, dead or closed target.

Each call ends in time, says why, and gives no stale bytes.

Fixtures: `windowed`, the name of the backend checked; `windowed_processes`, its name if its ranks are processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, OpTimeout, PeerFailed, RegionGone, Revoked
from holdfast.comms.transport.liveness import is_stopped
from holdfast.comms.window import Window
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import capabilities, leaks, outlived, wait_for_files
from holdfast.harness.conformance.windows import INTS, LARGE


def _put(window: Window, timeout: float) -> None:
    window.put(torch.ones(4, dtype=INTS), 1, timeout=timeout)
    window.flush(1, timeout=timeout)


CALLS: dict[str, Callable[[Window, float], object]] = {
    "get": lambda window, timeout: window.get(torch.empty(4, dtype=INTS), 1, timeout=timeout),
    "put": _put,
    "fetch_add": lambda window, timeout: window.fetch_add(1, 0, 1, timeout=timeout),
    "compare_swap": lambda window, timeout: window.compare_swap(1, 0, 0, 0, timeout=timeout),
    "wait_signal": lambda window, timeout: window.wait_signal(1, timeout=timeout),
}
"""Calls that need rank 1."""


def offered(backend: str) -> dict[str, Callable[[Window, float], object]]:
    """Those of `CALLS` that the backend says that it has."""
    atomics = capabilities(backend).atomics
    return {name: op for name, op in CALLS.items() if atomics or name not in ("fetch_add", "compare_swap")}


# -- what a busy, stopped or dead target means


def test_a_sleeping_target_delays_no_other_rank(windowed: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> float:
        mine = torch.full((1000,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            comm.barrier()
            began = time.monotonic()
            if comm.rank == 1:
                wait_for_files(tmp_path / "called")
            else:
                for op in (name for name in offered(windowed) if name != "wait_signal"):
                    CALLS[op](window, 10.0)
                (tmp_path / "called").touch()
            took = time.monotonic() - began
            comm.barrier()
        return took

    with LocalCluster(2, windowed) as cluster:
        assert cluster.run(body)[0] < 5.0, "the target makes no call for 10 s, unless the others are done"


def test_a_stopped_target_is_read_or_named_in_time(windowed_processes: str, tmp_path: Path) -> None:
    """A read succeeds where the backend says that targets are passive; else it ends in time and names the target."""
    passive = capabilities(windowed_processes).passive_target == "none"

    def body(comm: Communicator) -> None:
        mine = torch.full((LARGE,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            pids = comm.all_gather_object(os.getpid())
            comm.barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            while not is_stopped(pids[1]):
                time.sleep(0.01)
            got, late = torch.full((LARGE,), 7), False
            try:
                window.get(got, 1, timeout=1.0)
            except OpTimeout as error:
                late = True
                assert error.missing_ranks == (1,)
            assert not (late and passive)
            assert torch.equal(got, torch.full((LARGE,), 7 if late else 1)), "all or nothing"
            with pytest.raises(OpTimeout) as caught:
                window.wait_signal(1, timeout=0.3)
            assert caught.value.missing_ranks == (1,)
            (tmp_path / "done").write_text("done")
            os.kill(pids[1], signal.SIGKILL)

    outlived(windowed_processes, body, tmp_path / "done")


def _window_whose_other_end_is_killed(comm: Communicator) -> Window:
    """A window; rank 1 is killed 0.1 s after rank 0 has it, and does not return from this call."""
    window = comm.window(torch.zeros(LARGE, dtype=INTS))
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if comm.rank == 1:
        time.sleep(20.0)
        pytest.fail("nobody has killed rank 1")
    threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL)).start()
    return window


def test_a_killed_target_is_named_to_ranks_that_wait_for_it(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = _window_whose_other_end_is_killed(comm)
        began = time.monotonic()
        with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
            window.wait_signal(1, timeout=10.0)
        with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
            while True:
                window.get(torch.empty(LARGE, dtype=INTS), 1, timeout=10.0)
        for name, op in offered(windowed_processes).items():
            with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
                op(window, 10.0)
                pytest.fail(name)
        assert time.monotonic() - began < 5.0, "far below the timeout"
        (tmp_path / "done").write_text("done")

    outlived(windowed_processes, body, tmp_path / "done")


def test_a_target_that_is_killed_in_the_middle_of_a_get(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = _window_whose_other_end_is_killed(comm)
        with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
            while True:
                window.get(torch.empty(LARGE, dtype=INTS), 1, timeout=10.0)
        (tmp_path / "done").write_text("done")

    outlived(windowed_processes, body, tmp_path / "done")


def test_an_abort_ends_a_wait_for_a_signal(windowed: str) -> None:
    def body(comm: Communicator) -> float:
        window = comm.window(torch.zeros(4))
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.2)
            comm.abort("disk on fire")
            return 0.0
        began = time.monotonic()
        with pytest.raises((Revoked, RegionGone)):
            window.wait_signal(1, timeout=10.0)
        return time.monotonic() - began

    with LocalCluster(2, windowed) as cluster:
        assert cluster.run(body)[0] < 5.0


# -- closing


def test_a_window_that_its_owner_closed_is_gone_for_other_ranks(windowed: str) -> None:
    def body(comm: Communicator) -> None:
        mine = torch.full((4,), float(comm.rank))
        window = comm.window(mine)
        if comm.rank == 1:
            window.close()
            mine.fill_(99)
        comm.barrier()
        if comm.rank == 0:
            for call in (window.get, window.put):
                with pytest.raises(RegionGone, match="rank 1 has closed"):
                    call(torch.ones(4), 1)
            with pytest.raises(RegionGone):
                window.wait_signal(1, timeout=5.0)
        comm.barrier()
        assert mine.tolist() == [99.0 if comm.rank else 0.0] * 4

    with LocalCluster(2, windowed) as cluster:
        cluster.run(body)


def test_a_window_closed_in_the_middle_of_gets_gives_no_later_bytes(windowed: str) -> None:
    def body(comm: Communicator) -> None:
        for _ in range(3):
            mine = torch.zeros(LARGE, dtype=INTS)
            window = comm.window(mine)
            comm.barrier()
            if comm.rank == 1:
                time.sleep(0.03)
                window.close()
                mine.fill_(9)
            else:
                got = torch.empty(LARGE, dtype=INTS)
                with pytest.raises(RegionGone, match="rank 1 has closed"):
                    while True:
                        window.get(got, 1, timeout=10.0)
                        assert not got.any()
            comm.barrier()
            window.close()

    with LocalCluster(2, windowed) as cluster:
        cluster.run(body)


@pytest.mark.parametrize("closing", ["the window", "its communicator"])
def test_a_window_is_closed_while_threads_are_inside_its_calls(windowed: str, closing: str) -> None:
    def body(comm: Communicator) -> None:
        part = comm.split([0, 1])
        window, peer, inside = part.window(torch.zeros(LARGE, dtype=INTS)), 1 - comm.rank, threading.Event()

        def gets() -> None:
            got = torch.empty(LARGE, dtype=INTS)
            with pytest.raises((RegionGone, Revoked)):
                while True:
                    window.get(got, peer)
                    inside.set()

        def waits() -> None:
            with pytest.raises((RegionGone, Revoked)):
                window.wait_signal(peer)

        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(gets), threads.submit(waits)]
            inside.wait(10.0)
            comm.barrier()
            (window if closing == "the window" else part).close()
            for call in calls:
                call.result()
        comm.barrier()
        part.close()

    with LocalCluster(2, windowed) as cluster:
        cluster.run(body)


def test_a_new_window_on_the_same_memory_is_another_window(windowed: str) -> None:
    def body(comm: Communicator) -> None:
        mine = torch.zeros(1000)
        first = comm.window(mine)
        comm.barrier()
        if comm.rank == 1:
            first.close()
            mine.fill_(5)
        comm.barrier()
        second = comm.window(mine)
        comm.barrier()
        if comm.rank == 0:
            got = torch.zeros(1000)
            with pytest.raises(RegionGone):
                first.get(got, 1)
            assert not got.any()
            second.get(got, 1)
            assert torch.equal(got, torch.full((1000,), 5.0))
        comm.barrier()

    with LocalCluster(2, windowed) as cluster:
        cluster.run(body)


def test_communicators_with_windows_leave_nothing_behind(windowed_processes: str) -> None:
    """Communicators aborted, or closed before their windows, leave no descriptors, threads and maps behind."""

    def body(comm: Communicator, rounds: int) -> list[str]:
        def turn(number: int) -> None:
            part = comm.split(range(comm.size))
            window = part.window(torch.zeros(10_000))
            window.put(torch.ones(10), 1 - part.rank)
            window.flush()
            part.barrier()
            if number % 3 == 0:
                window.close()
            if number % 3 == 1 and part.rank == 0:
                part.abort("enough")
            part.close()
            comm.barrier()

        return leaks(turn, rounds, "shm", warm_up=3)

    with LocalCluster(2, windowed_processes, timeout=60.0) as cluster:
        assert cluster.run(body, 12) == [[], []]
