"""Signals at any point of any call: a handler may abort and close, and Ctrl-C reaches the caller. Forked children."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, Revoked, UsedAfterFork
from holdfast.comms.system import signal_safety
from holdfast.comms.system.forks import Living
from holdfast.comms.system.signal_safety import HandlerEvent, HandlerLock, run_shielded, shared_lock
from holdfast.comms.system.waiting import run_interruptible
from holdfast.ft import Session
from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer
from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from support.children import children
from support.comms.collectives import COLLECTIVES, collective
from support.comms.meeting import alone
from support.comms.ranks import MPI, on_ranks, on_ranks_of
from support.programs.forked_programs import run_python
from support.rpc_servers import RpcThread
from support.waiting import PROGRAM_SECONDS, once_it_waits

CALLS: dict[str, Callable[[Communicator, int], object]] = {
    **{op: lambda comm, turn, op=op: getattr(comm, op)(*_arguments(op, comm.rank, turn % 8)) for op in COLLECTIVES},
    "all_reduce of another size": lambda comm, turn: comm.all_reduce(torch.zeros(100_000)),
    "all_reduce, strided": lambda comm, turn: comm.all_reduce(torch.zeros(8, 8).t()[::2]),
    "all_reduce, later": lambda comm, turn: comm.all_reduce(torch.zeros(9), async_op=True).wait(),
    "all_gather_object": lambda comm, turn: comm.all_gather_object({"turn": turn}),
    "broadcast_object": lambda comm, turn: comm.broadcast_object(turn, 0),
    "window": lambda comm, turn: _window(comm),
    "split": lambda comm, turn: comm.split([comm.rank]).close(),
}


@cache
def _arguments(op: str, rank: int, turn: int) -> Sequence[Any]:
    return collective(op, rank, 2, 400 * turn + 1, turn % 2).arguments


def _window(comm: Communicator) -> None:
    with comm.window(torch.zeros(8)) as window:
        for _ in range(5):
            window.put(torch.ones(4), 1 - comm.rank)
            window.signal(1 - comm.rank)
            window.wait_signal(1 - comm.rank)


def end(part: Communicator, number: int) -> None:
    (part.abort if number % 2 else part.close)()


def press_ctrl_c(part: Communicator, number: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [end, press_ctrl_c])
@on_ranks(2, of="process_backend", checks="0", timeout=120.0)
def test_a_signal_at_any_point_of_any_call(whole: Communicator, act: Callable[[Communicator, int], None]) -> None:
    """Rank 0 gets a signal at a random point of its calls, over and over. Rank 1 makes the same calls."""
    assert threading.current_thread() is threading.main_thread()
    calls = [call for call in CALLS if call != "window" or whole.backend != "gloo"]
    draw, wrong, unraisable = random.Random(whole.rank), list[str](), list[str]()
    handled, lost = [0], list[str]()

    def note(event: sys.UnraisableHookArgs) -> None:
        # Python loses what a handler raises in a callback of a weak reference.
        in_weak_set = event.exc_type is KeyboardInterrupt and "WeakSet" in repr(event.object)
        (lost if in_weak_set else unraisable).append(f"{event.exc_type.__name__} in {event.object!r}")

    sys.unraisablehook = note

    def handle(number: int, frame: object) -> None:
        handled[0] += 1
        act(part, handled[0])

    before = signal.signal(signal.SIGALRM, handle)
    gc.disable()  # the collector calls such callbacks, too
    gc.freeze()
    for turn, call in enumerate(calls * 2):
        part = whole.split([0, 1], timeout=30.0)
        handled[0], ended, count, first = 0, "", 0, None
        lost.clear()
        gc.collect()
        if call in COLLECTIVES:  # the signal shall hit the op, and not the making of its tensors
            for number in range(8):
                _arguments(call, whole.rank, number)
        try:
            if whole.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-5, 4e-3))
            for count in range(1_000_000 if whole.rank == 0 or call != "split" else 0):
                CALLS[call](part, count)
                first = first if first is not None or not handled[0] else count
                if first is not None and count > first + 100:
                    ended = "" if lost else "went on after the signal"
                    break
        except KeyboardInterrupt:
            pass
        except HoldfastError as error:
            if whole.rank == 0 and part.over is None:
                ended = repr(error)
        except BaseException as error:
            ended = repr(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if ended:
            wrong.append(f"{call}, round {turn}, call {count}: {ended}")
        part.abort("the round is over")
        part.close()
        if not part._executor._released:
            wrong.append(f"{call}, round {turn}: not released")
        whole.barrier(timeout=30.0)
    signal.signal(signal.SIGALRM, before)
    gc.unfreeze()
    gc.enable()
    assert wrong + unraisable == []


def test_an_object_may_be_added_amid_a_collection_that_another_addition_has_begun() -> None:
    """As by what a collection ends, or by a thread that runs meanwhile."""

    class Thing:
        pass

    living, things, before = Living[Thing](), [Thing() for _ in range(400)], gc.get_threshold()
    others = list[Thing]()

    def collected(phase: str, info: object) -> None:
        others.append(Thing())
        living.add(others[-1])

    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        for thing in things:
            living.add(thing)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert set(living) == {*things, *others} and others


def test_an_object_that_goes_runs_no_code_in_which_what_a_handler_raises_would_be_lost() -> None:
    class Thing:
        pass

    living, calls, kept = Living[Thing](), list[str](), Thing()
    living.add(kept, "first")
    living.add(kept, "last")
    for _ in range(1000):
        thing = Thing()
        living.add(thing)
        sys.setprofile(lambda frame, event, _: calls.append(event))
        del thing
        sys.setprofile(None)
    assert living.noted() == [(kept, "last")]
    assert set(calls) <= {"c_call"}  # of setprofile itself
    assert len(living._refs) < 100


def test_what_a_handler_asks_for_below_the_lock_is_done_right_after() -> None:
    lock, done = HandlerLock(), list[str]()

    def outer() -> None:
        lock.run(lambda: done.append("nested"), lambda: done.append("again"))  # as a handler does at this point
        done.append("outer")

    lock.run(outer, pytest.fail)
    assert done == ["outer", "again"]

    def fails() -> None:
        lock.run(pytest.fail, lambda: done.append("after the failure"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lock.run(fails, pytest.fail)
    assert done[2:] == ["after the failure"]


def test_a_shielded_call_ends_before_the_interruption_is_raised() -> None:
    ended = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_shielded(interrupted)
    assert ended == [True]
    with pytest.raises(KeyError):
        run_shielded(lambda: {}["nothing"])


def test_a_call_whose_thread_begins_after_the_interruption_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran beside its caller, which had gone on, and found half of what it was to make."""
    launched, made = list[Callable[[], None]](), list[int]()

    def interrupted(run: Callable[[], None], _: tuple[()]) -> None:
        launched.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(signal_safety, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_shielded(lambda: made.append(1))
    launched[0]()
    for thread in threading.enumerate():
        if thread.name == "holdfast-shielded":
            thread.join()
    assert made == []


INTERRUPTED_SHIELDS = """
import random, signal
from holdfast.comms.system.signal_safety import run_shielded

def press_ctrl_c(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, press_ctrl_c)
draw, raised = random.Random(1), 0
for _ in range(10_000):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 2e-4))
        run_shielded(lambda: None)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        raised += 1
print(raised)
"""


def test_an_interruption_at_any_point_of_a_shielded_call_lets_it_and_the_program_end() -> None:
    """It left a lock of a threading.Event locked, for which the call's thread waited, and the program at its end."""
    assert int(run_python("-c", INTERRUPTED_SHIELDS)) > 100


def test_a_shielded_call_runs_at_once_below_a_handler_that_came_under_a_shared_lock() -> None:
    lock, threads = shared_lock(), list[threading.Thread]()
    with lock:
        run_shielded(lambda: threads.append(threading.current_thread()))
    run_shielded(lambda: threads.append(threading.current_thread()))
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()


def wait_interrupted(event: HandlerEvent, at: int, handler: Callable[[], None]) -> bool:
    """Wait for an event, with a call of `handler`, as that of a signal, before one of the interpreter's steps.

    Returns whether there were so many steps. Another thread sets the event if the wait lasts before that one.
    """
    steps = 0

    def step(frame: FrameType, kind: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += kind == "opcode"
        if kind == "opcode" and steps == at:
            sys.settrace(None)
            handler()
        return step

    with once_it_waits(lambda: steps < at and event.set()):
        before = sys.gettrace()  # that of coverage
        sys.settrace(step)
        try:
            event.wait(PROGRAM_SECONDS)
        finally:
            sys.settrace(before)
    return steps >= at


def test_an_event_that_a_handler_sets_at_any_point_of_a_wait_ends_it() -> None:
    began, event, at = time.monotonic(), HandlerEvent(), 1
    while wait_interrupted(event, at, event.set):
        event, at = HandlerEvent(), at + 1
    assert at > 30
    assert time.monotonic() - began < PROGRAM_SECONDS


def test_a_handler_that_raises_at_any_point_of_a_wait_leaves_the_event_for_others() -> None:
    def press_ctrl_c() -> None:
        raise KeyboardInterrupt

    event, at = HandlerEvent(), 1
    with ThreadPoolExecutor(1) as other:
        while True:
            waiting = other.submit(event.wait, PROGRAM_SECONDS)
            try:
                wait_interrupted(event, at, press_ctrl_c)
                break
            except KeyboardInterrupt:
                event.set()
                assert waiting.result()
            event, at = HandlerEvent(), at + 1
        event.set()
    assert at > 30


checks = pytest.fixture(lambda: "0", scope="module")  # usual ops take the fast path, others the slow one
on_processes = pytest.mark.parametrize("two_ranks", ["shm", "gloo", "ucx", MPI], indirect=True)


def in_child(body: Callable[[], Any]) -> Any:
    with children() as start:
        child = start(lambda pipe: pipe.send(body()))
        heard = child.hear()
        child.end()
        return heard


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
    tensor, prepared = torch.ones(8), comm.prepare("barrier")
    comm.all_reduce(tensor)
    prepared()
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(torch.full((8,), 100.0)),
        lambda: comm.all_reduce(torch.full((8,), 100.0), async_op=True),
        lambda: comm.send(tensor, 1 - comm.rank),
        lambda: comm.broadcast_object({"a": 1}, 0),
        lambda: comm.barrier(),
        prepared,
        lambda: comm.split([comm.rank]),
        lambda: comm.window(tensor),
        lambda: comm.announce(b"word", Revoked(1)),
        lambda: comm.over,
        lambda: comm.__enter__(),
    ]
    words = f"communicator {comm.name!r} belongs to process {os.getpid()}"
    for said in in_child(lambda: [refusal(call) for call in calls]):
        assert words in said and "make one here" in said
    comm.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 8


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
    comm.barrier()  # a wait that the other rank has ended by its signal refuses nothing
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

    works = [comm.issue("slow", 0, slow, None, async_op=True) for _ in range(3)]
    assert begun.wait(20.0)
    try:
        refused = in_child(lambda: [bool(refusal(work.wait)) for work in (*works, done)])
        assert refused == [True, True, True, False]
    finally:
        go.set()
    for work in works:
        work.wait()


@on_processes
def test_data_loader_workers_run_and_exit_without_output(
    two_ranks: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(comm: Communicator) -> float:
        class Samples(torch.utils.data.Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.tensor(float(index * comm.size + comm.rank))

        loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork")
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
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", _SCRIPT, tmp_path / "meeting"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
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
        assert len(cluster.start(train).results(timeout=PROGRAM_SECONDS)) == 2


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
