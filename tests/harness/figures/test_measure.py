"""The engine that measures: workers that are called, turns in order, and what becomes of a contestant that fails."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.ft.processes.zygote_client import ForkedProcess
from holdfast.harness.measure import workers
from holdfast.harness.measure.rounds import TimedTurn, Workload, mirrored, rotated, take_turns, total_wrong
from holdfast.harness.measure.stats import pairwise
from holdfast.harness.measure.worker import WorkerBarrier, serve
from support.waiting import eventually


class Sum(msgspec.Struct, frozen=True):
    terms: tuple[int, ...]


class Adder:
    """What the workers of these tests serve."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def add(self, order: Sum, scale: int = 1) -> int:
        return scale * sum(order.terms) + self._rank

    def divide(self, number: int) -> float:
        return number / self._rank

    def fly(self) -> None:
        raise NotImplementedError("it has no wings")

    async def wait(self) -> str:
        return "waited"

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _be(folder: Path, rank: int) -> None:
    import asyncio

    serve(folder / "socket", Adder(rank), "adder", rank, "plain Python", asyncio.run)  # type: ignore[arg-type]


def _start(ranks: range, place: workers.Place) -> list[ForkedProcess]:
    return [workers.fork(place, f"adder {rank}", partial(_be, place.folder, rank)) for rank in ranks]


adders = partial(workers.WorkerGroup, "adder", 2, partial(_start, range(2)))

# Workers --------------------------------------------------------------------------------------------------------------


def test_a_call_has_typed_arguments_and_a_failure_of_all_workers_is_told_from_that_of_one() -> None:
    with adders() as group:
        assert group.call("add", Sum((1, 2)), into=int) == [3, 4]
        assert group.call("add", Sum((1, 2)), 10, into=int) == [30, 31]
        assert group.call("wait", into=str) == ["waited", "waited"]
        assert workers.call(group.workers[1:], "divide", 3, into=float) == [3.0]
        group.workers[0].send("add", Sum((5,)))
        assert workers.call(group.workers[1:], "add", Sum((1,)), into=int) == [2], "while the other call goes on"
        assert workers.answers(group.workers[:1], "add", int) == [5]
        with pytest.raises(NotImplementedError, match="it has no wings"):
            group.call("fly", into=type(None))
        with pytest.raises(workers.OpFailed, match="Expected `object`"):
            group.call("add", 7, into=int)
        with pytest.raises(workers.OpFailed, match="_call is no public method"):
            group.call("_call", into=int)
        with pytest.raises(workers.WorkerFailed, match=r"adder: divide: ZeroDivisionError: division by zero"):
            group.call("divide", 3, into=float)


def test_a_worker_that_died_is_named_and_another_takes_its_place_until_the_group_is_ended() -> None:
    with adders() as group:
        with pytest.raises(workers.WorkerFailed, match=r"adder: adder [01] (ended|is gone)"):
            group.call("die", into=type(None))
        new = group.replace(group.workers[0], partial(_start, range(1)))
        assert workers.call([new], "add", Sum((1,)), into=int) == [1]
        group.close(gently=False)
        assert not Path(f"/proc/{new.pid}").exists()


def test_workers_that_do_not_come_are_named_and_reported_with_the_last_words(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def program(*words: str) -> Callable[[workers.Place], list[workers.WorkerProgram]]:
        return lambda place: [workers.WorkerProgram(place, words, {})]

    with pytest.raises(workers.WorkerFailed, match="idler ended while starting: no such luck"):
        workers.WorkerGroup("idler", 1, program("sh", "-c", "echo no such luck"))
    monkeypatch.setattr("holdfast.harness.measure.workers.LATE_SECONDS", 0.0)
    capfd.readouterr()
    with pytest.raises(workers.WorkerFailed, match="idler did not start in time: it said nothing"):
        workers.WorkerGroup("idler", 2, program("sleep", "60"), timeout=0.5)
    first, process = capfd.readouterr().err.splitlines()
    assert first == "idler: after 0 s 0 of 2 workers have come; it said nothing"
    assert process.startswith("  pid ") and "s of processor time" in process


def test_a_program_that_is_killed_leaves_no_shared_memory() -> None:
    program = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1).name, flush=True)
time.sleep(60)
"""
    place = workers.Place("idler")
    try:
        worker = workers.WorkerProgram(place, [sys.executable, "-c", program], {})
        eventually(lambda: place.output.read_bytes().endswith(b"\n"))
        segment = Path("/dev/shm", place.output.read_text().strip())
        assert segment.exists()
        worker.close(0.0)
        assert not segment.exists()
    finally:
        place.close()


def test_a_barrier_lets_none_through_before_the_last(tmp_path: Path) -> None:
    WorkerBarrier.create(tmp_path / "barrier", 2)
    one, other = (WorkerBarrier(tmp_path / "barrier", rank, 2, lambda: None) for rank in range(2))
    with pytest.raises(TimeoutError, match="not all ranks came"):
        one.wait(timeout=0.01)
    other.wait(timeout=1.0)
    for each in (one, other):
        each.close()


# Turns ----------------------------------------------------------------------------------------------------------------


class Named(Workload[str]):
    """A workload that notes the order of turns, and fails for some."""

    name = "named"

    def __init__(self, **failing: Exception) -> None:
        self.order: list[str] = []
        self._failing = failing

    def turn(self, contestant: str, number: int) -> TimedTurn:
        if contestant in self._failing and number == 1:
            raise self._failing[contestant]
        self.order.append(contestant)
        return TimedTurn({"op": [float(number)]}, wrong=0)


def test_the_order_of_turns_moves_by_one_each_round_or_is_mirrored_so_that_drift_cancels() -> None:
    workload = Named()
    turns = take_turns(workload, {name: name for name in "abc"}, range(3), lambda name, error: None)
    assert "".join(workload.order) == "abc" + "bca" + "cab"
    assert [turn.seconds["op"] for turn in turns["b"]] == [[0.0], [1.0], [2.0]]
    workload = Named()
    turns = take_turns(workload, {"a": "a", "b": "b"}, range(2), lambda name, error: None, mirrored)
    assert "".join(workload.order) == "abba" + "baab"
    assert len(turns["a"]) == 4
    assert rotated([], 3) == []


@pytest.mark.parametrize("error", [NotImplementedError("no"), workers.OpFailed("no"), workers.WorkerFailed("no")])
def test_a_contestant_that_fails_has_no_more_turns_and_no_results(error: Exception) -> None:
    workload, failed = Named(b=error), dict[str, Exception]()
    turns = take_turns(workload, {name: name for name in "abc"}, range(3), failed.__setitem__)
    assert failed == {"b": error}
    assert "".join(workload.order) == "abc" + "ca" + "ac"
    assert {name: len(each) for name, each in turns.items()} == {"a": 3, "c": 3}


def test_a_count_of_wrong_results_is_unknown_if_one_is() -> None:
    assert total_wrong([1, 2, 0]) == 3
    assert total_wrong([1, None]) is None


def test_ratios_pair_the_turns_of_a_round() -> None:
    assert pairwise((1, 10, 2), (2, 30, 8)) == (3.0, 2.0, 4.0)
