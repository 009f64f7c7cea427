"""Public calls accept integers of any kind, and timeouts as numbers or timedeltas."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.comms import Communicator, Recv, Send
from holdfast.comms.quantities import integer, integer_in, seconds, seconds_or, time_left
from holdfast.comms.work import DONE
from holdfast.ft import Timeouts
from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from support.comms.collectives import collective
from support.comms.ranks import on_ranks_of, second_tier

INTEGERS: list[Callable[[int], Any]] = [int, np.int64, np.uint8, np.int16, lambda value: torch.tensor(value)]
NO_INTEGERS: list[Any] = [True, np.True_, 1.0, np.float32(1), "1", None, [1], torch.tensor(1.5), torch.ones(2)]
TIMEOUTS: list[Any] = [5, 5.0, np.float32(5), np.int64(5), timedelta(seconds=5)]
NO_TIMEOUTS: list[Any] = [True, "5", float("nan"), float("inf"), -float("inf"), np.float64("nan")]
NO_TIMEOUTS += [1e9, -1e9, 1e12, 10**400, -(10**400)]


@given(st.integers(0, 200), st.sampled_from(INTEGERS))
def test_every_kind_of_integer_becomes_its_int(value: int, kind: Callable[[int], Any]) -> None:
    found = integer(kind(value), "it")
    assert found == value and type(found) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_a_value_that_is_no_integer_is_a_type_error_that_names_the_argument(value: Any) -> None:
    with pytest.raises(TypeError, match="offset must be a whole number"):
        integer(value, "offset")


def test_a_timeout_is_a_number_or_a_timedelta_and_zero_if_it_is_negative() -> None:
    for value in TIMEOUTS:
        assert seconds(value) == 5.0 and type(seconds(value)) is float
    for value in (-1, -0.1, timedelta(-1), np.float32(-2)):
        assert seconds(value) == 0.0
    assert [seconds_or(value, 7.0) for value in (None, timedelta(seconds=5), 0)] == [7.0, 5.0, 0.0]


@pytest.mark.parametrize("value", NO_TIMEOUTS, ids=repr)
def test_a_timeout_is_never_a_wait_without_an_end(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout="):
        seconds(value)


def test_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="size=0 is out of range: at least 1"):
        integer_in(0, "size", 1)
    with pytest.raises(ValueError, match="size=9 is out of range: 1 to 8"):
        integer_in(np.int64(9), "size", 1, 8)
    with pytest.raises(ValueError, match="size=0 is out of range: 1 to 8"):
        integer_in(0, "size", 1, 8)
    assert [integer_in(number, "size", 1, 8) for number in (1, 8)] == [1, 8] and integer_in(9, "size", 9) == 9


def test_what_is_left_of_a_timeout_falls_to_zero_and_no_timeout_has_none() -> None:
    left, over = time_left(timedelta(seconds=60)), time_left(-1)
    first, later = left(), left()
    assert first is not None and later is not None and 60.0 >= first >= later > 0.0
    assert over() == 0.0 and time_left(None)() is None


def refuse(calls: list[Callable[[Any], object]], values: list[Any], error: Any = TypeError) -> None:
    """Check that each call refuses each of the values."""
    for value, call in product(values, calls):
        with pytest.raises(error):
            call(value)


@pytest.mark.parametrize("two_ranks", ["inproc", "shm", *second_tier("gloo", "ucx", "mpi")], indirect=True)
@on_ranks_of("two_ranks")
def test_a_communicator_takes_whole_numbers_of_every_kind(comm: Communicator) -> None:
    x, peer = torch.ones(4), 1 - comm.rank
    for kind in INTEGERS:
        for op in ("broadcast", "reduce", "gather", "scatter"):
            *arguments, _ = collective(op, comm.rank, 2, 4, root=1).arguments
            getattr(comm, op)(*arguments, kind(1))
        comm.all_to_all_single(torch.empty(4), x, [kind(2), kind(2)], [kind(2), kind(2)])
        comm.batch_send_recv([Send(x, kind(peer), kind(7)), Recv(torch.empty(4), kind(peer), kind(7))])
        (comm.send if comm.rank else comm.recv)(x, kind(peer), kind(7))
        comm.broadcast_object("word", kind(1))
    calls: list[Callable[[Any], object]] = [
        lambda bad: comm.broadcast(x, bad),
        lambda bad: comm.reduce(x, bad),
        lambda bad: comm.gather(x, None, bad),
        lambda bad: comm.scatter(x, None, bad),
        lambda bad: comm.all_to_all_single(torch.empty(4), x, [bad, 2], [2, 2]),
        lambda bad: comm.send(x, bad),
        lambda bad: comm.send(x, peer, bad),
        lambda bad: comm.recv(x, bad),
        lambda bad: comm.batch_send_recv([Recv(x, bad)]),
        lambda bad: comm.broadcast_object(None, bad),
        lambda bad: comm.split([bad]),
    ]
    refuse(calls, NO_INTEGERS)
    refuse([lambda late: comm.all_reduce(x, timeout=late)], NO_TIMEOUTS, (TypeError, ValueError))
    for timeout in TIMEOUTS:
        comm.all_reduce(x, timeout=timeout, async_op=True).wait(timeout)


@pytest.mark.parametrize("two_ranks", ["inproc", "shm", *second_tier("ucx", "mpi")], indirect=True)
@on_ranks_of("two_ranks")
def test_a_window_takes_whole_numbers_of_every_kind(comm: Communicator) -> None:
    one = torch.ones(1, dtype=torch.int64)
    with comm.window(torch.zeros(4, dtype=torch.int64)) as window:
        for kind in INTEGERS:
            peer = kind(1 - comm.rank)
            window.put(one, peer, kind(2))
            window.get(one.clone(), peer, kind(3), timeout=timedelta(seconds=5))
            window.fetch_add(peer, kind(0), kind(1))
            window.compare_swap(peer, kind(1), kind(0), kind(3))
            window.signal(peer)
            window.wait_signal(peer)
            window.flush(peer)
        calls: list[Callable[[Any], object]] = [
            lambda bad: window.put(one, bad),
            lambda bad: window.put(one, 0, bad),
            lambda bad: window.get(one, 0, bad),
            lambda bad: window.fetch_add(0, bad, 1),
            lambda bad: window.fetch_add(0, 0, bad),
            lambda bad: window.compare_swap(0, 0, bad, 1),
            lambda bad: window.signal(bad),
            lambda bad: window.wait_signal(bad),
        ]
        refuse(calls, NO_INTEGERS)
        comm.barrier()


def test_a_plane_takes_offsets_and_timeouts_of_every_kind() -> None:
    one = torch.ones(1)
    with comms.memory("inproc") as plane, plane.expose(torch.ones(4)) as region:
        for kind in INTEGERS:
            plane.read(region.handle, one, kind(4), timeout=timedelta(seconds=5)).wait()
        refuse([lambda bad: plane.read(region.handle, one, bad)], NO_INTEGERS)
        refuse([lambda late: plane.read(region.handle, one, timeout=late)], NO_TIMEOUTS, (TypeError, ValueError))


def test_a_store_takes_versions_and_timeouts_of_every_kind() -> None:
    weights = {"x": torch.ones(1)}
    with WeightStore("memory://", keep=np.int64(20), timeout=timedelta(seconds=10)) as store:
        for version, kind in enumerate(INTEGERS):
            store.publish(kind(version), weights, part=kind(0), parts=kind(1), timeout=np.float32(5))
            assert store.get(kind(version), weights, timeout=timedelta(seconds=5)) == version
        refuse([lambda bad: store.publish(bad, weights)], NO_INTEGERS, (TypeError, ValueError))
        refuse([lambda late: store.wait(0, late)], NO_TIMEOUTS, (TypeError, ValueError))


def test_sessions_and_clusters_take_numbers_of_every_kind(tmp_path: Path) -> None:
    quick = Timeouts(heartbeat=timedelta(milliseconds=100), suspect=np.float32(1), join=np.int64(20))  # type: ignore[arg-type]
    assert quick == Timeouts(heartbeat=0.1, suspect=1.0, join=20.0)
    for late in (*NO_TIMEOUTS, 0, -1.0):
        with pytest.raises(ValueError, match="timeout join="):
            Timeouts(join=late)
    LocalCluster(np.int64(2), "inproc", np.int8(1), timeout=timedelta(seconds=5))  # type: ignore[arg-type]
    refuse([lambda bad: LocalCluster(bad, "inproc")], NO_INTEGERS)
    connect: Any = partial(comms.connect, "inproc", rendezvous=f"file://{tmp_path}/meet")
    connect(rank=np.int64(0), size=np.int8(1)).close()
    refuse([lambda bad: connect(rank=bad, size=1)], [bad for bad in NO_INTEGERS if bad is not None])
    waits: list[Callable[[Any], object]] = [
        lambda late: LocalCluster(2, "inproc", timeout=late),
        lambda late: connect(rank=0, size=1, timeout=late),
        DONE.wait,
    ]
    refuse(waits, ["5", float("nan")], (TypeError, ValueError))
