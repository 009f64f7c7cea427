"""Checks of windows: calls between living ranks, and calls with a silent, dead or closed target.

Each call to such a target ends in time, says why, and gives no stale bytes.

Fixtures: `ranks`, a cluster over the backend that is checked; `windowed`, the name of the backend checked;
`windowed_processes`, its name if its ranks are processes.

"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast.comms import Communicator, OpTimeout, PeerFailed, RegionGone, Revoked, Unsupported, Window
from holdfast.comms.transport.liveness import Liveness, is_stopped
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import capabilities, leaks, on_each_rank, outlived, wait_for_files

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


# Asynchronous calls ---------------------------------------------------------------------------------------------------


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
        theirs.fill_(99)  # after the owner's close, stores reach no other process
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


# A busy, stopped or dead target ---------------------------------------------------------------------------------------


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
"""Calls that need rank 1."""


def offered(backend: str) -> dict[str, Callable[[Window, float], object]]:
    """Those of `CALLS` that the backend says that it has."""
    atomics = capabilities(backend).atomics
    return {name: op for name, op in CALLS.items() if atomics or name not in ("fetch_add", "compare_swap")}


# -- what a busy, stopped or dead target means


def test_a_sleeping_target_delays_no_other_rank(windowed: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> float:
        mine = torch.full((1000,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            comm.barrier()
            began = time.monotonic()
            if comm.rank == 1:
                wait_for_files(tmp_path / "called")
            else:
                for op in (name for name in offered(windowed) if name != "wait_signal"):
                    CALLS[op](window, 10.0)
                (tmp_path / "called").touch()
            took = time.monotonic() - began
            comm.barrier()
        return took

    with LocalCluster(2, windowed) as cluster:
        assert cluster.run(body)[0] < 5.0, "the target makes no call for 10 s, unless the others are done"


def test_a_stopped_target_is_read_or_named_in_time(windowed_processes: str, tmp_path: Path) -> None:
    """A read succeeds where the backend says that targets are passive; else it ends in time and names the target."""
    passive = capabilities(windowed_processes).passive_target == "none"

    def body(comm: Communicator) -> None:
        mine = torch.full((LARGE,), comm.rank, dtype=INTS)
        with comm.window(mine) as window:
            pids = comm.all_gather_object(os.getpid())
            comm.barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            while not is_stopped(pids[1]):
                time.sleep(0.01)
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

    outlived(windowed_processes, body, tmp_path / "done")


def _window_whose_other_end_is_killed(comm: Communicator) -> Window:
    """A window; rank 1 is killed 0.1 s after rank 0 has it, and does not return from this call."""
    window = comm.window(torch.zeros(LARGE, dtype=INTS))
    pids = comm.all_gather_object(os.getpid())
    comm.barrier()
    if comm.rank == 1:
        time.sleep(20.0)
        pytest.fail("nobody has killed rank 1")
    threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL)).start()
    return window


def test_a_killed_target_is_named_to_ranks_that_wait_for_it(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = _window_whose_other_end_is_killed(comm)
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

    outlived(windowed_processes, body, tmp_path / "done")


def test_a_target_that_is_killed_in_the_middle_of_a_get(windowed_processes: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        window = _window_whose_other_end_is_killed(comm)
        with pytest.raises((RegionGone, PeerFailed, Revoked), match="rank 1"):
            while True:
                window.get(torch.empty(LARGE, dtype=INTS), 1, timeout=10.0)
        (tmp_path / "done").write_text("done")

    outlived(windowed_processes, body, tmp_path / "done")


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


def test_a_window_that_its_owner_closed_is_gone_for_other_ranks(windowed: str) -> None:
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
    """Communicators aborted, or closed before their windows, leave no descriptors, threads and maps behind."""

    def body(comm: Communicator, rounds: int) -> list[str]:
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

        return leaks(turn, rounds, "shm", warm_up=3)

    with LocalCluster(2, windowed_processes, timeout=60.0) as cluster:
        assert cluster.run(body, 12) == [[], []]
