"""A forked child cannot use or close its parent's communicators, and ends without a warning."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, UsedAfterFork
from holdfast.comms.ops import OpDescription
from holdfast.comms.system.waiting import run_interruptible
from holdfast.ft import Session
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer
from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from support.children import Child
from support.comms.meeting import alone
from support.comms.ranks import MPI, on_ranks_of
from support.rpc_servers import RpcThread
from support.waiting import PROGRAM_SECONDS

on_processes = pytest.mark.parametrize("two_ranks", ["shm", "gloo", "ucx", MPI], indirect=True)


def in_child(body: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The result of `body()` in a forked child."""

    def run(pipe: Any) -> None:
        pipe.send(body())

    child = Child(run)
    try:
        heard = child.hear(seconds)
        child.end()
        return heard
    finally:
        child.kill()
        child.pipe.close()


def refusal(call: Callable[[], object]) -> str:
    """The error that `call` raises in a forked child; "" if it raises none."""
    try:
        call()
    except UsedAfterFork as error:
        return str(error)
    return ""


@on_processes
@on_ranks_of("two_ranks")
def test_a_forked_child_cannot_use_its_parents_communicator(comm: Communicator) -> None:
    tensor = torch.ones(8)
    comm.all_reduce(tensor)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(torch.full((8,), 100.0)),
        lambda: comm.all_reduce(torch.full((8,), 100.0), async_op=True),
        lambda: comm.send(tensor, 1 - comm.rank),
        lambda: comm.broadcast_object({"a": 1}, 0),
        lambda: comm.barrier(),
        lambda: comm.split([comm.rank]),
        lambda: comm.window(tensor),
        lambda: comm.announce(b"word"),
        lambda: comm.over,
        lambda: comm.__enter__(),
    ]
    words = f"communicator {comm.name!r} belongs to process {os.getpid()}"
    for said in in_child(lambda: [refusal(call) for call in calls]):
        assert words in said and "make one here" in said
    comm.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 8


def test_a_forked_child_cannot_use_a_communicator_of_threads(tmp_path: Path) -> None:
    with alone(tmp_path, "inproc") as comm:
        assert "communicator 'default'" in in_child(lambda: refusal(lambda: comm.barrier()))
        comm.barrier()


@on_processes
@on_ranks_of("two_ranks")
def test_a_forked_child_ends_no_communicator_of_its_parent(comm: Communicator) -> None:
    window = comm.window(torch.zeros(4))
    waiting = window.wait_signal(1 - comm.rank, async_op=True)

    def child() -> str:
        assert "a window of rank" in refusal(lambda: window.put(torch.ones(1), 0))
        assert "a call of a window" in refusal(waiting.wait)
        window.close()
        window.__exit__(None, None, None)
        comm.abort("a child ends")
        comm.close()
        comm.__exit__(ValueError, ValueError("raised in a child"), None)
        gc.collect()
        return "ended"

    assert in_child(child) == "ended"
    window.put(torch.ones(1), 1 - comm.rank)
    window.signal(1 - comm.rank)
    waiting.wait(30.0)
    comm.barrier()
    window.close()
    tensor = torch.ones(4)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4


def test_a_forked_child_knows_which_rank_its_parent_is_and_can_connect_by_itself(
    comm: Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A data loader's worker shards its data by rank and size."""

    def child() -> tuple[object, ...]:
        with alone(tmp_path_factory.mktemp("childrens")) as mine:
            tensor = torch.ones(2)
            mine.all_reduce(tensor)
        return comm.rank, comm.size, comm.name, comm.epoch, comm.backend, repr(comm), tensor.tolist()

    *known, shown, tensor = in_child(child)
    assert known == [0, 1, "default", 0, "shm"] and "of a parent process" in shown
    assert tensor == [1.0, 1.0]


def test_a_work_that_is_pending_at_the_fork_fails_in_the_child(comm: Communicator) -> None:
    """The worker thread does not exist in the child, so a wait for it would never end."""
    done = comm.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    begun, go = threading.Event(), threading.Event()

    def slow(deadline: float) -> None:
        begun.set()
        go.wait(20.0)

    works = [comm._executor.issue(OpDescription("slow", 0, False), lambda: slow, True, None) for _ in range(3)]
    assert begun.wait(20.0)
    try:
        refused = in_child(lambda: [bool(refusal(work.wait)) for work in (*works, done)])
        assert refused == [True, True, True, False]
    finally:
        go.set()
    for work in works:
        work.wait()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """A user's dataset that holds the communicator and reads its rank."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index * self.comm.size + self.comm.rank))


@on_processes
def test_data_loader_workers_run_and_exit_without_output(
    two_ranks: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(comm: Communicator) -> float:
        loader = torch.utils.data.DataLoader(Samples(comm), num_workers=2, multiprocessing_context="fork")
        total = torch.zeros(())
        for sample in loader:
            comm.all_reduce(sample)
            total += sample.sum()
        return float(total)

    assert two_ranks.run(body) == [sum(4.0 * index + 1.0 for index in range(8))] * 2
    assert capfd.readouterr().err.strip() == ""


_SCRIPT = """
import os, sys, torch
from holdfast import comms
used = []
for backend in ("shm", "gloo", "ucx"):
    comm = comms.connect(backend, rank=0, size=1, rendezvous="file://" + sys.argv[1], name=backend)
    comm.all_reduce(torch.ones(4))
    used.append((comm, comm.window(torch.ones(4))))
plane = comms.memory("shm"); region = plane.expose(torch.ones(4))
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    for comm, window in used:
        comm.all_reduce(torch.ones(4))
        comm.close()
    plane.read(region.handle, torch.zeros(4)).wait()
    plane.close()
"""


def test_a_forked_child_ends_as_any_interpreter_does(tmp_path: Path) -> None:
    """Atexit handlers and destructors run; they neither wait for the parent's threads nor free its resources."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", _SCRIPT, str(tmp_path / "meeting")],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_of_a_session_leaves_it_alone() -> None:
    def train(session: Session) -> None:
        model = torch.nn.Linear(2, 2)
        session.attach("model", model)
        for attempt in session.steps(3):

            def child(attempt: Any = attempt) -> object:
                calls: list[Callable[[], object]] = [
                    lambda: session.attach("more", model),
                    lambda: session.steps(2),
                    lambda: session.subscribe(print),
                    lambda: session.process_group(),
                    lambda: attempt.process_group(),
                    lambda: attempt.comm.barrier(),
                ]
                refused = [bool(refusal(call)) for call in calls]
                attempt.__exit__(None, None, None)
                session.__exit__(None, None, None)
                return all(refused), session.rank == attempt.rank, session.step

            with attempt:
                attempt.comm.all_reduce(torch.ones(2))
                if attempt.step == 1:
                    assert in_child(child) == (True, True, 1)

    with LocalCluster(2, "shm", timeout=60.0) as cluster:
        assert len(cluster.start(train).results(timeout=60)) == 2


def test_a_forked_child_leaves_stores_and_control_connections_alone(tmp_path: Path) -> None:
    known: dict[str, Any] = {"key": b"k" * 32, "job": "job"}
    server = AsyncRpcServer(identity="server", handlers={"echo": lambda peer, body: body}, **known)
    with (
        WeightStore(f"sqlite://{tmp_path}/job.sqlite", replicas=1) as store,
        contextlib.closing(LoopThread("holdfast-rpc-server")) as loop,
    ):
        loop.run(server.start(), 10.0)
        client = RpcThread(server.address, identity="client", **known)
        store.publish(1, {"w": torch.ones(4)})
        lease = store.pin(1)

        def child() -> object:
            said = [refusal(lambda: store.latest()), refusal(lambda: client.call("echo")), refusal(lambda: loop.alive)]
            lease.release()
            store.close()
            loop.close()
            return [bool(each) for each in said]

        assert in_child(child) == [True, True, True]
        assert client.call("echo", b"still here") == b"still here"
        assert store.latest() == 1
        lease.release()
        client.close()
        loop.run(server.close(), 10.0)


def test_a_fork_waits_for_threads_that_end() -> None:
    """They hold locks of libc, which the child would inherit."""

    class SlowToGo:
        def __del__(self) -> None:
            time.sleep(0.2)

    local = threading.local()

    def call() -> Path:
        local.value = SlowToGo()
        return Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")

    thread = run_interruptible(call, lambda: None)
    assert thread.exists()
    if (child := os.fork()) == 0:
        os._exit(thread.exists())
    assert os.waitpid(child, 0)[1] == 0
