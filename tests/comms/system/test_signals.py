"""Signals at any point of any call: a handler may abort and close, and Ctrl-C always reaches the caller."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError
from holdfast.comms.system.signal_safety import HandlerLock, run_shielded, shared_lock
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks

LOCAL = ("split",)
"""Calls that need no other rank."""

CALLS: dict[str, Callable[[Communicator, int], object]] = {
    **{op: lambda comm, turn, op=op: _collective(comm, op, turn) for op in COLLECTIVES},
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


def _collective(comm: Communicator, op: str, turn: int) -> None:
    getattr(comm, op)(*_arguments(op, comm.rank, turn % 8))


def _window(comm: Communicator) -> None:
    with comm.window(torch.zeros(8)) as window:
        for _ in range(5):
            window.put(torch.ones(4), 1 - comm.rank)
            window.signal(1 - comm.rank)
            window.wait_signal(1 - comm.rank)


def _rounds(
    whole: Communicator, calls: list[str], rounds: int, on_signal: Callable[[Communicator, int], None]
) -> list[str]:
    """Rank 0 gets a signal at a random point of its calls, over and over. Rank 1 makes the same calls."""
    assert threading.current_thread() is threading.main_thread()
    draw, wrong, unraisable = random.Random(whole.rank), list[str](), list[str]()
    handled, lost = [0], list[str]()

    def note(event: sys.UnraisableHookArgs) -> None:
        # Python loses what a handler raises in a callback of a weak reference.
        in_weak_set = event.exc_type is KeyboardInterrupt and "WeakSet" in repr(event.object)
        (lost if in_weak_set else unraisable).append(f"{event.exc_type.__name__} in {event.object!r}")

    sys.unraisablehook = note

    def handle(number: int, frame: object) -> None:
        handled[0] += 1
        on_signal(part, handled[0])

    before = signal.signal(signal.SIGALRM, handle)
    gc.disable()  # the collector calls such callbacks, too
    gc.freeze()
    for turn in range(rounds):
        call = calls[turn % len(calls)]
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
            for count in range(1_000_000 if whole.rank == 0 or call not in LOCAL else 0):
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
    return wrong + unraisable


def end(part: Communicator, number: int) -> None:
    (part.abort if number % 2 else part.close)()


def press_ctrl_c(part: Communicator, number: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [end, press_ctrl_c])
@on_ranks(2, of="process_backend", checks="0", timeout=120.0)
def test_a_signal_at_any_point_of_any_call(comm: Communicator, act: Callable[[Communicator, int], None]) -> None:
    calls = [call for call in CALLS if call != "window" or comm.backend != "gloo"]
    assert _rounds(comm, calls, 2 * len(calls), act) == []


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
    launched, made = list[threading.Thread](), list[int]()

    def interrupted(thread: threading.Thread) -> None:
        launched.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_shielded(lambda: made.append(1))
    launched[0].start()
    launched[0].join()
    assert made == []


def test_a_shielded_call_runs_at_once_below_a_handler_that_came_under_a_shared_lock() -> None:
    lock, threads = shared_lock(), list[threading.Thread]()
    with lock:
        run_shielded(lambda: threads.append(threading.current_thread()))
    run_shielded(lambda: threads.append(threading.current_thread()))
    assert threads[0] is threading.main_thread() and threads[1] is not threading.main_thread()
