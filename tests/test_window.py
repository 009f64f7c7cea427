"""One-sided access between ranks: put, get, atomics, signals; and what happens when a window's owner goes away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.harness import LocalCluster

WINDOWED = ["inproc", "shm"]


@pytest.fixture(scope="module", params=["inproc-1", "inproc-3", "shm-1", "shm-3"])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend, size = request.param.split("-")
    with LocalCluster(int(size), backend, timeout=30.0) as cluster:
        yield cluster


def test_every_rank_puts_into_and_gets_from_every_other(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


def test_sizes_may_differ_and_strides_of_what_is_moved_too(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


def test_fetch_add_loses_nothing(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> list[int]:
        counters = torch.zeros(3, dtype=torch.int64)
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


def test_a_signal_comes_after_what_was_put_before_it(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
        mine = torch.zeros(1000)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with comm.window(mine) as window:
            for turn in range(1, 50):
                window.put(torch.full((1000,), float(turn)), right)
                window.signal(right)
                window.wait_signal(left)
                assert torch.equal(mine, torch.full((1000,), float(turn)))
                comm.barrier()
            with pytest.raises(OpTimeout, match="wait_signal"):
                window.wait_signal(left, timeout=0.05)
            comm.barrier()

    ranks.run(body)


def test_bad_arguments_move_nothing(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


@pytest.mark.parametrize("backend_name", WINDOWED)
def test_a_window_that_its_owner_closed_is_gone_for_the_others(backend_name: str) -> None:
    def body(comm: Communicator) -> None:
        mine = torch.full((4,), float(comm.rank))
        window = comm.window(mine)
        if comm.rank == 1:
            window.close()
            mine.fill_(99)
        comm.barrier()
        if comm.rank == 0:
            for call in (lambda: window.get(torch.empty(4), 1), lambda: window.put(torch.ones(4), 1)):
                with pytest.raises(RegionGone, match="rank 1 has closed"):
                    call()
            with pytest.raises(RegionGone):
                window.wait_signal(1, timeout=5.0)
        comm.barrier()
        assert mine.tolist() == [99.0 if comm.rank else 0.0] * 4

    with LocalCluster(2, backend_name) as cluster:
        cluster.run(body)


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
            with pytest.raises(RegionGone, match="rank 1 is gone"):
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
            window._update(0, 0, lambda old: os.kill(os.getpid(), signal.SIGKILL) or 0, 5.0)
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
