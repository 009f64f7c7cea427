"""Windows: put, get, atomics and signals between ranks, and what happens when the owner of the memory goes away.

Fixtures: `ranks`, a cluster over the backend that is checked; `windowed`, its name; `windowed_processes`, its name if
its ranks are processes.
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

from holdfast.comms import Communicator, HoldfastError, OpTimeout, PeerFailed, RegionGone, Revoked, Unsupported
from holdfast.comms.window import Window
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.capability import capabilities

INTS = torch.int64


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
"""Each of them needs rank 1."""
LARGE = 3_000_001
"""Elements of an int64 tensor that is moved in several blocks."""


def offered(backend: str) -> dict[str, Callable[[Window, float], object]]:
    """Those of `CALLS` that the backend says it has."""
    atomics = capabilities(backend).atomics
    return {name: op for name, op in CALLS.items() if atomics or name not in ("fetch_add", "compare_swap")}


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


def test_windows_of_many_blocks(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


def test_window_sizes_may_differ_and_strides_of_what_is_moved_too(ranks: LocalCluster) -> None:
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


def test_several_windows_at_once(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


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


def test_fetch_add_of_32_bits_wraps_around(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
        mine = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
        with comm.window(mine) as window:
            peer = (comm.rank + 1) % comm.size
            assert window.fetch_add(peer, 0, 3) == 2**31 - 1
            comm.barrier()
            assert mine.tolist() == [-(2**31) + 2, 7]
            comm.barrier()

    ranks.run(body)


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
            with pytest.raises(OpTimeout, match="wait_signal") as caught:
                window.wait_signal(left, timeout=0.05)
            assert caught.value.missing_ranks == (left,)
            comm.barrier()

    ranks.run(body)


def test_bad_arguments_of_a_window_move_nothing(ranks: LocalCluster) -> None:
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


def test_a_window_is_used_from_several_threads(ranks: LocalCluster) -> None:
    def body(comm: Communicator) -> None:
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

    ranks.run(body)


# -- what a busy, stopped or dead target means


def test_a_target_that_sleeps_holds_nobody_up(windowed: str) -> None:
    def body(comm: Communicator) -> float:
        mine = torch.full((1000,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            comm.barrier()
            began = time.monotonic()
            if comm.rank == 1:
                time.sleep(1.5)
            else:
                for op in (name for name in offered(windowed) if name != "wait_signal"):
                    CALLS[op](window, 10.0)
            took = time.monotonic() - began
            comm.barrier()
        return took

    with LocalCluster(2, windowed) as cluster:
        assert cluster.run(body)[0] < 1.0


def test_a_stopped_target_is_read_or_named_in_time(windowed_processes: str, tmp_path: Path) -> None:
    """Read, where the backend says that targets do nothing; else the op ends in time, and says whom it waited for."""
    passive = capabilities(windowed_processes).passive_target == "none"

    def body(comm: Communicator) -> None:
        mine = torch.full((LARGE,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            pids = comm.all_gather_object(os.getpid())
            comm.barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            time.sleep(0.1)
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

    with LocalCluster(2, windowed_processes, timeout=20.0) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert (tmp_path / "done").exists()


def test_a_target_that_is_killed_is_named_to_those_who_wait_for_it(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(torch.zeros(LARGE, dtype=INTS))
        pids = comm.all_gather_object(os.getpid())
        comm.barrier()
        if comm.rank == 1:
            time.sleep(20.0)
            return
        threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL)).start()
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

    with LocalCluster(2, windowed_processes, timeout=20.0) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert (tmp_path / "done").exists()


def test_a_target_that_is_killed_in_the_middle_of_a_get(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = comm.window(torch.zeros(LARGE, dtype=INTS))
        pids = comm.all_gather_object(os.getpid())
        comm.barrier()
        if comm.rank == 1:
            time.sleep(20.0)
            return
        threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
            while True:
                window.get(torch.empty(LARGE, dtype=INTS), 1, timeout=10.0)
        (tmp_path / "done").write_text("done")

    with LocalCluster(2, windowed_processes, timeout=20.0) as cluster, pytest.raises(HoldfastError):
        cluster.run(body)
    assert (tmp_path / "done").exists()


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


def test_a_window_that_its_owner_closed_is_gone_for_the_others(windowed: str) -> None:
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
    """Some aborted, some closed before their windows: descriptors, threads and maps stay as many."""

    def body(comm: Communicator, rounds: int) -> tuple[int, int, int]:
        def held() -> tuple[int, int, int]:
            maps = Path("/proc/self/maps").read_text()
            return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("shm")

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

        for number in range(3):
            turn(number)
        start = held()
        for number in range(rounds):
            turn(number)
        time.sleep(0.1)
        return tuple(b - a for a, b in zip(start, held(), strict=True))  # type: ignore[return-value]

    with LocalCluster(2, windowed_processes, timeout=60.0) as cluster:
        for grown in cluster.run(body, 12):
            assert max(grown) <= 1, f"descriptors, threads, maps grew by {grown}"
