"""Checks of windows: asynchronous calls, mapped tensors, later registration, and what a window says of itself.

Fixtures: `ranks`, a cluster over the backend that is checked; `windowed` and `windowed_processes` as in `window_ends`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, OpTimeout, PeerFailed, RegionGone, Revoked, Unsupported, Window
from holdfast.comms.transport.liveness import Liveness
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import capabilities, on_each_rank, outlived
from holdfast.harness.conformance.windows import INTS, LARGE

ENDED = (RegionGone, PeerFailed, Revoked)


# -- asynchronous calls


@on_each_rank
def test_asynchronous_calls_to_one_rank_run_in_the_order_issued(comm: Communicator) -> None:
    mine, got = torch.zeros(1000), torch.empty(2, 1000)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.window(mine) as window:
        arrived = window.wait_signal(left, async_op=True)  # first: it must not keep the puts back
        works = [window.put(torch.full((1000,), float(turn)), right, async_op=True) for turn in range(5)]
        works.append(window.get(got[0], right, async_op=True))
        window.put(torch.full((1000,), 7.0), right)
        assert all(work.done() for work in works), "a synchronous call comes after those issued before it"
        works += [window.get(got[1], right, async_op=True), window.signal(right, async_op=True)]
        works += [window.flush(right, async_op=True), window.flush(async_op=True), arrived]
        for work in works:
            work.wait(timeout=30.0)
            assert work.done() and work.exception() is None
        assert torch.equal(got, torch.tensor([[4.0], [7.0]]).expand(2, 1000))
        assert torch.equal(mine, torch.full((1000,), 7.0))
        comm.barrier()


@on_each_rank
def test_asynchronous_gets_fill_tensors_of_any_strides(comm: Communicator) -> None:
    peer, into = (comm.rank + 1) % comm.size, torch.zeros(6, 2)
    with comm.window(torch.full((6,), float(comm.rank))) as window, torch.inference_mode():
        columns = torch.zeros(6, 2)
        for each in (into, columns):
            window.get(each[:, 1], peer, async_op=True).wait(30.0)
            assert torch.equal(each, torch.tensor([0.0, float(peer)]).expand(6, 2))
        comm.barrier()


def test_asynchronous_atomics_have_results(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> list[int]:
        with comm.window(torch.zeros(2, dtype=INTS)) as window:
            if not window.info.atomics:
                pytest.skip("no atomics")
            works = [window.fetch_add(0, 0, 1, async_op=True) for _ in range(50)]
            tickets = [work.result(30.0) for work in works]
            assert tickets == sorted(tickets)
            swapped = window.compare_swap(comm.rank, 1, 0, 9, async_op=True)
            assert (swapped.result(30.0), window.fetch_add(comm.rank, 1, 0)) == (0, 9)
            comm.barrier()
        return tickets

    tickets = [ticket for seen in ranks.run(body) for ticket in seen]
    assert sorted(tickets) == list(range(50 * ranks.size))


@on_each_rank
def test_bad_arguments_of_asynchronous_calls_are_refused_at_once(comm: Communicator) -> None:
    with comm.window(torch.zeros(8)) as window:
        for rank, offset in ((comm.size, 0), (0, 8), (0, -1)):
            with pytest.raises(ValueError, match=r"out of range|outside"):
                window.put(torch.ones(1), rank, offset, async_op=True)
        with pytest.raises(Unsupported, match="atomics"):
            window.fetch_add(0, 0, 1, async_op=True)
        late = window.wait_signal(comm.rank, timeout=0.05, async_op=True)
        with pytest.raises(OpTimeout, match="wait_signal"):
            late.wait(30.0)
        assert isinstance(late.exception(), OpTimeout)
        comm.barrier()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_end_of_a_window_ends_its_asynchronous_calls(windowed: str, end: str) -> None:
    def body(comm: Communicator) -> None:
        part = comm.split(range(comm.size))
        window = part.window(torch.zeros(LARGE, dtype=INTS))
        got = torch.empty(LARGE, dtype=INTS)
        part.barrier()
        waits = [window.wait_signal(1 - comm.rank, async_op=True) for _ in range(2)]
        gets = [window.get(got, 1 - comm.rank, async_op=True) for _ in range(20)]
        window.close() if end == "close" else part.abort("disk on fire")
        for work in waits:
            with pytest.raises(ENDED):
                work.wait(10.0)
        for work in gets:  # the first may have been done before
            with contextlib.suppress(*ENDED):
                work.wait(10.0)
        comm.barrier()
        part.close()

    with LocalCluster(2, windowed) as cluster:
        cluster.run(body)


def _kill_rank_1(comm: Communicator) -> None:
    """Return on rank 0 once the kernel says that rank 1 is gone, and windows must know it."""
    comm.barrier()
    if comm.rank == 1:
        time.sleep(20.0)
        pytest.fail("rank 1 was not killed")
    liveness = Liveness(comm.peers, comm.rank)
    os.kill(comm.peers[1].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while not liveness.dead() and time.monotonic() < deadline:
        time.sleep(0.001)
    liveness.close()
    time.sleep(0.005)  # what windows know of deaths may be a millisecond old


def test_a_killed_target_ends_asynchronous_calls(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(torch.zeros(LARGE, dtype=INTS))
        _kill_rank_1(comm)
        waiting = window.wait_signal(1, async_op=True)
        with pytest.raises(ENDED, match="rank 1"):
            waiting.wait(10.0)
        with pytest.raises(ENDED, match="rank 1"):
            window.get(torch.empty(LARGE, dtype=INTS), 1, async_op=True).wait(10.0)
        (tmp_path / "done").touch()

    outlived(windowed_processes, body, tmp_path / "done")


# -- info and map


@on_each_rank
def test_a_window_says_what_it_exposes(comm: Communicator) -> None:
    with comm.window(torch.zeros(comm.rank + 1, 3, dtype=torch.int32)) as window:
        info = window.info
        assert info.shapes == tuple((rank + 1, 3) for rank in range(comm.size))
        assert info.sizes == tuple(3 * rank + 3 for rank in range(comm.size))
        assert (info.dtype, info.device) == (torch.int32, comm.device)
        assert info.atomics == capabilities(comm.backend).atomics
        assert info.access in ("mapped", "messages")
        with pytest.raises(AttributeError):
            info.dtype = torch.int64  # type: ignore[misc]
        comm.barrier()


def _mapped(window: Window, rank: int) -> torch.Tensor | None:
    """The tensor of a rank; None if this window cannot be mapped, and says so. A rank can always map its own."""
    assert window.map(window.rank).shape == window.info.shapes[window.rank]
    if window.info.access == "mapped":
        return window.map(rank)
    if rank == window.rank:
        return None
    with pytest.raises(Unsupported, match="map"):
        window.map(rank)
    return None


@on_each_rank
def test_loads_and_stores_reach_a_mapped_tensor(comm: Communicator) -> None:
    mine = torch.full((2, comm.size), -1, dtype=torch.int16)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.window(mine) as window:
        theirs = _mapped(window, right)
        if theirs is not None:
            assert theirs.shape == mine.shape and theirs.dtype == mine.dtype
            theirs[1, comm.rank] = comm.rank
            window.signal(right)
            window.wait_signal(left)
            assert mine[1, left].item() == left and mine[0].eq(-1).all()
            mine[0, 0] = 50 + comm.rank
            comm.barrier()
            assert theirs[0, 0].item() == 50 + right
            with pytest.raises(ValueError, match="out of range"):
                window.map(comm.size)
        comm.barrier()
    comm.barrier()
    if theirs is not None:
        theirs.fill_(99)  # after the owner's close, stores reach nobody
    comm.barrier()
    assert not mine.eq(99).any()


def test_a_mapped_tensor_outlives_its_rank_and_calls_say_that_it_is_gone(
    windowed_processes: str, tmp_path: Path
) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(torch.full((LARGE,), 5, dtype=INTS))
        theirs = _mapped(window, 1 - comm.rank)
        _kill_rank_1(comm)
        if theirs is not None:
            assert torch.equal(theirs, torch.full((LARGE,), 5, dtype=INTS)), "no SIGBUS"
            theirs.fill_(6)
            for call in (window.map, window.flush, window.signal):
                with pytest.raises(RegionGone, match="rank 1 is gone"):
                    call(1)
        window.close()
        assert theirs is None or theirs[-1].item() == 6
        (tmp_path / "done").touch()

    outlived(windowed_processes, body, tmp_path / "done")


# -- registration


@on_each_rank
def test_a_window_gets_its_tensor_later_and_another_one_after_it(comm: Communicator) -> None:
    window = comm.window(None)
    peer = (comm.rank + 1) % comm.size
    for _ in range(2):
        with pytest.raises(RegionGone, match="no tensor is registered"):
            window.signal(peer)
        with pytest.raises(RegionGone, match="no tensor is registered"):
            window.info  # noqa: B018
        window.register(torch.full((3,), float(comm.rank)))
        with pytest.raises(ValueError, match="deregister"):
            window.register(torch.ones(3))
        got = torch.empty(3)
        window.get(got, peer, async_op=True)
        window.deregister()
        assert got.tolist() == [float(peer)] * 3, "issued calls end before the tensor is withdrawn"
        numbers = torch.full((comm.size,), comm.rank)
        window.register(numbers)
        window.put(torch.tensor([-1]), peer, comm.rank)
        window.deregister()
        assert numbers[(comm.rank - 1) % comm.size].item() == -1
        window.deregister()
    assert not window.closed
    window.close()
    assert window.closed
    with pytest.raises(RegionGone, match="this rank has closed"):
        window.register(torch.ones(3))
