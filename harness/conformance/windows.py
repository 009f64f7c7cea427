"""Checks of windows: put, get, atomics and signals between living ranks.

Fixture: `ranks`, a cluster over the backend that is checked.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast.comms import Communicator, OpTimeout, RegionGone, Unsupported
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import on_each_rank

INTS = torch.int64
LARGE = 3_000_001
"""Elements of an int64 tensor that is moved in several blocks."""


@on_each_rank
def test_every_rank_puts_into_and_gets_from_every_other(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        for count in (1, 1000, 300_000):
            mine = torch.zeros(comm.size, count, dtype=dtype)
            alias = mine.view(-1)
            with comm.window(mine) as window:
                gift = torch.full((count,), comm.rank + 1, dtype=dtype)
                for rank in range(comm.size):
                    window.put(gift, rank, offset=comm.rank * count)
                window.flush()
                comm.barrier()
                for r in range(comm.size):
                    assert torch.equal(mine[r], torch.full((count,), r + 1, dtype=dtype))
                got = torch.empty(count, dtype=dtype)
                window.get(got, (comm.rank + 1) % comm.size, offset=comm.rank * count)
                assert torch.equal(got, gift)
                comm.barrier()
            assert torch.equal(alias.view_as(mine)[0], torch.ones(count, dtype=dtype))


@on_each_rank
def test_windows_of_many_blocks(comm: Communicator) -> None:
    mine = torch.arange(LARGE) * (comm.rank + 1)
    peer = (comm.rank + 1) % comm.size
    with comm.window(mine) as window:
        got = torch.empty(LARGE, dtype=INTS)
        window.get(got, peer)
        assert torch.equal(got, torch.arange(LARGE) * (peer + 1))
        comm.barrier()
        window.put(torch.full((LARGE,), -comm.rank), peer)
        window.flush(peer)
        comm.barrier()
        assert torch.equal(mine, torch.full((LARGE,), -((comm.rank - 1) % comm.size)))
        comm.barrier()


@on_each_rank
def test_window_sizes_may_differ_and_strides_of_what_is_moved_too(comm: Communicator) -> None:
    mine = torch.arange(10.0 * comm.rank)
    with comm.window(mine) as window:
        last = comm.size - 1
        if last:
            into = torch.zeros(4, 2)
            window.get(into[:, 0], last, offset=3)
            assert into[:, 0].tolist() == [3.0, 4.0, 5.0, 6.0] and not into[:, 1].any()
        window.get(torch.empty(0), 0)
        with pytest.raises(ValueError, match="outside rank 0's window"):
            window.get(torch.empty(1), 0)
        comm.barrier()


@on_each_rank
def test_several_windows_at_once(comm: Communicator) -> None:
    tensors = [torch.full((5,), float(10 * comm.rank + each)) for each in range(3)]
    windows = [comm.window(tensor) for tensor in tensors]
    peer, got = (comm.rank + 1) % comm.size, torch.empty(5)
    for each in (2, 0, 1):
        windows[each].get(got, peer)
        assert got.tolist() == [float(10 * peer + each)] * 5
    comm.barrier()
    windows[1].close()
    windows[2].get(got, peer)
    assert got[0].item() == 10 * peer + 2
    comm.barrier()
    for window in windows:
        window.close()
    comm.barrier()


def test_fetch_add_loses_nothing(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> list[int]:
        counters = torch.zeros(3, dtype=INTS)
        with comm.window(counters) as window:
            seen = [window.fetch_add(0, 1, 1) for _ in range(200)]
            window.fetch_add(0, 2, -5)
            comm.barrier()
            if comm.rank == 0:
                assert counters.tolist() == [0, 200 * comm.size, -5 * comm.size]
            comm.barrier()
        return seen

    tickets = [ticket for seen in ranks.run(body) for ticket in seen]
    assert sorted(tickets) == list(range(200 * ranks.size))


@on_each_rank
def test_fetch_add_of_32_bits_wraps_around(comm: Communicator) -> None:
    mine = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
    with comm.window(mine) as window:
        peer = (comm.rank + 1) % comm.size
        assert window.fetch_add(peer, 0, 3) == 2**31 - 1
        comm.barrier()
        assert mine.tolist() == [-(2**31) + 2, 7]
        comm.barrier()


def test_compare_swap_lets_one_win(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> bool:
        with comm.window(torch.full((1,), -1, dtype=torch.int32)) as window:
            won = window.compare_swap(0, 0, -1, comm.rank) == -1
            comm.barrier()
            holder = torch.empty(1, dtype=torch.int32)
            window.get(holder, 0)
            assert won == (holder.item() == comm.rank)
            comm.barrier()
        return won

    assert ranks.run(body).count(True) == 1


@on_each_rank
def test_a_signal_comes_after_what_was_put_before_it(comm: Communicator) -> None:
    mine = torch.zeros(1000)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.window(mine) as window:
        for turn in range(1, 50):
            window.put(torch.full((1000,), float(turn)), right)
            window.signal(right)
            window.wait_signal(left)
            assert torch.equal(mine, torch.full((1000,), float(turn)))
            comm.barrier()
        with pytest.raises(OpTimeout, match="wait_signal") as caught:
            window.wait_signal(left, timeout=0.05)
        assert caught.value.missing_ranks == (left,)
        comm.barrier()


@on_each_rank
def test_bad_arguments_of_a_window_move_nothing(comm: Communicator) -> None:
    mine = torch.zeros(8)
    window = comm.window(mine)
    for rank, offset, count in ((comm.size, 0, 1), (-1, 0, 1), (0, 8, 1), (0, -1, 1), (0, 0, 9)):
        with pytest.raises(ValueError, match=r"out of range|outside"):
            window.put(torch.ones(count), rank, offset)
    with pytest.raises(ValueError, match=r"holds torch\.float32"):
        window.put(torch.ones(1, dtype=torch.float64), 0)
    with pytest.raises(Unsupported, match="atomics"):
        window.fetch_add(0, 0, 1)
    with pytest.raises(ValueError, match="contiguous"):
        comm.window(torch.zeros(4, 4).t())
    comm.barrier()
    assert not mine.any()
    window.close()
    window.close()
    with pytest.raises(RegionGone, match="this rank has closed"):
        window.get(torch.empty(1), 0)
    comm.barrier()


@on_each_rank
def test_a_window_is_used_from_several_threads(comm: Communicator) -> None:
    mine = torch.full((4, 1000), float(comm.rank))
    with comm.window(mine) as window:

        def use(row: int) -> None:
            got = torch.empty(1000)
            for turn in range(300):
                peer = (comm.rank + turn) % comm.size
                window.get(got, peer, offset=1000 * row)
                assert torch.equal(got, torch.full((1000,), float(peer))), (row, turn)

        with ThreadPoolExecutor(4) as threads:
            for used in [threads.submit(use, row) for row in range(4)]:
                used.result()
        comm.barrier()
