"""One-sided access between ranks: what every backend with windows promises, and what is special about ours."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, Unsupported
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.windows import *  # noqa: F403

SIZED = ["inproc-1", "inproc-3", "shm-1", "shm-3", "ucx-1", "ucx-3", "mpi-1", "mpi-3"]


@pytest.fixture(scope="module", params=SIZED)
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend, size = request.param.split("-")
    with LocalCluster(int(size), backend, timeout=30.0) as cluster:
        cluster.warm_up()
        yield cluster


@pytest.fixture(params=["inproc", "shm", "ucx", "mpi"])
def windowed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "ucx", "mpi"])
def windowed_processes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_window_whose_process_was_killed_is_gone(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(torch.zeros(4, dtype=torch.int64))
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        said = []
        for call in (
            lambda: window.get(torch.empty(4, dtype=torch.int64), 1),
            lambda: window.fetch_add(1, 0, 1),
            lambda: window.wait_signal(1, timeout=5.0),
        ):
            with pytest.raises(HoldfastError, match="rank 1 is gone"):
                call()
            said.append("gone")
        (tmp_path / str(comm.rank)).write_text(" ".join(said))

    with LocalCluster(2, "shm") as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert (tmp_path / "0").read_text() == "gone gone gone"


def test_a_killed_holder_of_an_atomic_lock_blocks_nobody() -> None:
    def body(comm: Communicator) -> int:
        window = comm.window(torch.zeros(1, dtype=torch.int64))
        comm.barrier()
        if comm.rank == 1:
            memory = window._memory
            memory.update(0, 0, torch.int64, lambda old: os.kill(os.getpid(), signal.SIGKILL) or 0, 5.0)  # type: ignore
        time.sleep(0.3)
        return window.fetch_add(0, 0, 7, timeout=5.0)

    with LocalCluster(2, "shm") as cluster:
        with pytest.raises(HoldfastError) as caught:
            cluster.run(body)
        assert "OpTimeout" not in repr(caught.value)


def test_a_backend_without_windows_says_so() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(Unsupported, match=r"comms\.memory"):
            comm.window(torch.zeros(1))

    with LocalCluster(1, "gloo") as cluster:
        cluster.run(body)


def test_windows_leave_nothing_behind() -> None:
    def body(comm: Communicator) -> int:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(30):
            with comm.window(torch.zeros(1000)):
                comm.barrier()
            comm.barrier()
        return len(list(Path("/proc/self/fd").iterdir())) - before

    with LocalCluster(2, "shm") as cluster:
        assert max(cluster.run(body)) <= 1


def test_a_closed_window_lets_its_tensor_go(windowed: str) -> None:
    """But for the last one: its communicator still knows it, to close it."""

    def body(comm: Communicator) -> int:
        tensors = []
        for _ in range(4):
            tensor = torch.zeros(1000)
            tensors.append(weakref.ref(tensor))
            with comm.window(tensor):
                comm.barrier()
            comm.barrier()
            del tensor
        gc.collect()
        return sum(tensor() is not None for tensor in tensors)

    with LocalCluster(2, windowed) as cluster:
        assert max(cluster.run(body)) <= 1
