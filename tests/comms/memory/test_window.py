"""One-sided access between ranks: the conformance kit's checks, and guarantees of the built-in windows."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, OpTimeout, RegionGone, Unsupported
from holdfast.comms._native import ActiveCalls, WindowBounds, Words
from holdfast.comms.onesided.mapped import MappedWindow, WindowLock
from holdfast.comms.onesided.window import Window, WindowInfo
from holdfast.comms.transport.base import WindowMemory, closed_there
from holdfast.comms.transport.liveness import is_gone, is_stopped
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.windows import *  # noqa: F403
from support.waiting import PATIENCE, eventually

SIZED = ["inproc-1", "inproc-3", "shm-1", "shm-3", "ucx-3", "mpi-3", "gloo-3"]
ALONE = [pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx-1", "mpi-1", "gloo-1")]


@pytest.fixture(scope="module", params=[*SIZED, *ALONE])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    backend, size = request.param.split("-")
    with LocalCluster(int(size), backend, timeout=30.0) as cluster:
        cluster.warm_up()
        yield cluster


@pytest.fixture(params=["inproc", "shm", "ucx", "mpi", "gloo"])
def windowed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "ucx", "mpi", "gloo"])
def windowed_processes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_signals_of_several_threads_all_count() -> None:
    count, threads = 2000, 4

    def body(comm: Communicator) -> int:
        with comm.window(torch.zeros(1)) as window:
            comm.barrier()
            if comm.rank == 0:
                senders = [
                    threading.Thread(target=lambda: [window.signal(1) for _ in range(count)]) for _ in range(threads)
                ]
                for sender in senders:
                    sender.start()
                for sender in senders:
                    sender.join()
            else:
                for _ in range(count * threads):
                    window.wait_signal(0, timeout=10.0)
            comm.barrier()
        return count * threads

    with LocalCluster(2, "shm") as cluster:
        cluster.run(body)


def hold(window: Window, target: int, then: signal.Signals) -> None:
    """Send this process a signal inside an atomic."""
    memory = window._memory
    assert isinstance(memory, MappedWindow)
    with memory._parts[target].lock.held(time.monotonic() + 5.0, lambda: None):
        os.kill(os.getpid(), then)


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_a_stopped_holder_of_a_lock_is_named_and_waiters_do_not_spin(backend: str) -> None:
    """The death of the target ends the wait at once."""

    def body(comm: Communicator) -> None:
        pids = [int(pid) for pid in comm.all_gather_object(os.getpid())]
        window = comm.window(torch.zeros(4, dtype=torch.int64))
        comm.barrier()
        if comm.rank == 1:
            hold(window, 0, signal.SIGSTOP)
            hold(window, 2, signal.SIGSTOP)
            return
        if comm.rank == 2:
            time.sleep(60.0)
        while not is_stopped(pids[1]):
            time.sleep(0.001)
        began, used = time.monotonic(), time.process_time()
        with pytest.raises(OpTimeout) as late:
            window.fetch_add(0, 0, 1, timeout=1.0)
        assert late.value.missing_ranks == (1,)
        assert time.process_time() - used < 0.7 * (time.monotonic() - began)
        os.kill(pids[1], signal.SIGCONT)
        assert window.fetch_add(0, 0, 1, timeout=10.0) == 0
        while not is_stopped(pids[1]):
            time.sleep(0.001)
        threading.Timer(0.2, lambda: os.kill(pids[2], signal.SIGKILL)).start()
        with pytest.raises(RegionGone, match="rank 2 is gone"):
            window.fetch_add(2, 0, 1, timeout=30.0)
        os.kill(pids[1], signal.SIGKILL)

    with LocalCluster(3, backend) as cluster:
        outcome = cluster.outcomes(body)[0]
        assert outcome.error is None, outcome.error


def test_a_wait_for_a_lock_raises_the_error_of_its_check() -> None:
    header = Words(bytearray(16))

    def look() -> None:
        raise RegionGone("closed meanwhile")

    lock = WindowLock(3, 0, header, 1, try_acquire=lambda: False, release=lambda: None)
    with pytest.raises(RegionGone, match="meanwhile"), lock.held(time.monotonic() + 30.0, look):
        pass
    with pytest.raises(OpTimeout) as late, lock.held(time.monotonic() - 1.0, lambda: None):
        pass
    assert late.value.missing_ranks == (3,), "the holder has not written its rank"


@pytest.mark.parametrize("backend", ["shm", "ucx"])
def test_a_killed_holder_of_a_lock_does_not_block_others(backend: str) -> None:
    def body(comm: Communicator) -> int:
        window = comm.window(torch.zeros(1, dtype=torch.int64))
        comm.barrier()
        if comm.rank == 1:
            hold(window, 0, signal.SIGKILL)
        eventually(lambda: is_gone(comm._context.peers[1]), 10.0)
        return window.fetch_add(0, 0, 7, timeout=5.0)

    with LocalCluster(2, backend) as cluster:
        assert cluster.outcomes(body)[0].value == 0


def test_a_backend_without_windows_says_so() -> None:
    def body(comm: Communicator) -> None:
        comm._windowed = False
        with pytest.raises(Unsupported, match=r"comms\.memory"):
            comm.window(torch.zeros(1))

    with LocalCluster(1, "inproc") as cluster:
        cluster.run(body)


def test_a_closed_window_releases_its_tensor(windowed: str) -> None:
    """All tensors but the last are released: the communicator refers to its last window until it is closed."""

    def body(comm: Communicator) -> int:
        tensors = []
        for _ in range(4):
            tensor = torch.zeros(1000)
            tensors.append(weakref.ref(tensor))
            with comm.window(tensor):
                comm.barrier()
            comm.barrier()
            del tensor
        gc.collect()
        return sum(tensor() is not None for tensor in tensors)

    with LocalCluster(2, windowed) as cluster:
        assert max(cluster.run(body)) <= 1


# -- the checks at the start of a call


def test_no_call_begins_after_close_and_running_calls_are_counted() -> None:
    calls = ActiveCalls(lambda: RegionGone("closed"))
    with calls, calls:
        assert (calls.running, calls.over) == (2, False)
        assert calls.end() and not calls.end()
        with pytest.raises(RegionGone, match="closed"), calls:
            raise AssertionError("a call began")
        assert (calls.running, calls.over) == (2, True)
    assert calls.running == 0


DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64]


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(-1, 3),
    st.integers(-2, 12),
    st.integers(0, 6),
)
def test_a_fitting_range_takes_the_quick_check(
    dtype: torch.dtype, of: torch.dtype, elements: list[int], rank: int, offset: int, count: int
) -> None:
    """Every range that does not fit must reach the full check."""
    bounds = WindowBounds(
        torch.empty(0, dtype=dtype), tuple(dtype.itemsize * each + dtype.itemsize - 1 for each in elements)
    )
    fits = of == dtype and 0 <= rank < len(elements) and 0 <= offset <= elements[rank] - count
    at = bounds.byte_offset(torch.zeros(count, dtype=of), rank, offset)
    assert at in ([offset * dtype.itemsize, -1] if fits else [-1])
    if fits and dtype in (torch.float32, torch.int64):
        assert at == offset * dtype.itemsize


def test_an_unusual_tensor_takes_the_full_check() -> None:
    bounds = WindowBounds(torch.empty(0), (400,))
    for tensor in (torch.ones(3, requires_grad=True), torch.ones(4)[::2], torch.ones(2).expand(2, 2), "tensor", None):
        assert bounds.byte_offset(tensor, 0, 0) == -1
    assert bounds.byte_offset(torch.ones(3), True, 0) == bounds.byte_offset(torch.ones(3), 0, 1 << 70) == -1
    with pytest.raises(TypeError):
        bounds.byte_offset(torch.ones(3), 0)  # type: ignore[call-arg]
    with pytest.raises(OverflowError):
        WindowBounds(torch.empty(0), (-1,))


Tensor = torch.Tensor


class OneSignaller(WindowMemory):
    """A window in which rank 0 does something whenever the waiting rank looks whether it lives."""

    sizes = (0,)

    def __init__(self, at_look: Callable[[OneSignaller], None]) -> None:
        super().__init__(1)
        self.arrived = 0
        self._at_look = at_look

    def count_signals(self, rank: int) -> int:
        return self.arrived

    def check_live(self, rank: int) -> None:
        self._at_look(self)

    def write(self, rank: int, offset: int, source: Tensor, deadline: float) -> None: ...

    def read(self, rank: int, offset: int, into: Tensor, deadline: float) -> None: ...

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return 0

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return 0

    def signal(self, rank: int, deadline: float) -> None: ...

    def flush(self, rank: int | None, deadline: float) -> None: ...

    def close(self) -> None: ...


def test_a_signal_between_the_looks_at_the_counter_and_at_the_rank_is_received() -> None:
    def signal_and_close(window: OneSignaller) -> None:
        window.arrived = 1
        raise closed_there(0)

    window, deadline = OneSignaller(signal_and_close), time.monotonic() + PATIENCE
    window.wait_signal(0, deadline)
    with pytest.raises(RegionGone, match="rank 0 has closed its window"):
        window.wait_signal(0, deadline)


def test_what_was_put_arrives_before_the_ranks_meet_to_withdraw_their_tensors() -> None:
    """Also where one rank has left before."""
    happened: list[object] = []

    class Posting(OneSignaller):
        sizes = (8, 8, 8)

        def flush(self, rank: int | None, deadline: float) -> None:
            happened.append(rank)
            if rank == 1:
                raise closed_there(1)

    info = WindowInfo((2,) * 3, ((2,),) * 3, torch.float32, torch.device("cpu"), "messages", atomics=False)
    exposed = Posting(lambda window: None), info
    window = Window(lambda tensor, timeout: exposed, lambda timeout: happened.append("all meet"), 0, 10.0, None)
    window.register(torch.zeros(2))
    window.deregister()
    assert happened == [0, 1, 2, "all meet"]
    window.close()
