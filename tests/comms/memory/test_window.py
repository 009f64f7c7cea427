"""One-sided access between ranks: the conformance kit's checks, and guarantees of the built-in windows."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, OpTimeout, RegionGone, Unsupported
from holdfast.comms._native import ActiveCalls, WindowBounds, Words
from holdfast.comms.onesided import requests
from holdfast.comms.onesided.mapped import MappedWindow, WindowLock
from holdfast.comms.onesided.requests import ADD, GET, HEAD, PIECE_BYTES, PUT, SIGNAL, SWAP, Exposed, Head
from holdfast.comms.onesided.window import Window, WindowInfo
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.transport.base import WindowMemory, closed_there
from holdfast.comms.transport.liveness import Liveness, PeerWatch, is_gone, is_stopped
from holdfast.harness.conformance.windows import *  # noqa: F403
from support.comms.meeting import run_in_threads, soon
from support.comms.ranks import MPI, each_of, on_ranks, second_tier, shared_ranks
from support.waiting import PATIENCE, eventually

SIZED = ["inproc-1", "inproc-3", "shm-1", "shm-3", "ucx-3", "mpi-3", "gloo-3"]
ranks = shared_ranks(3, *SIZED, *second_tier("ucx-1", "mpi-1", "gloo-1"), timeout=30.0)


windowed = each_of("inproc", "shm", "ucx", MPI, "gloo")
windowed_processes = each_of("shm", "ucx", MPI, "gloo")


@on_ranks(2, "shm")
def test_signals_of_several_threads_all_count(comm: Communicator) -> None:
    count, threads = 2000, 4
    with comm.window(torch.zeros(1)) as window:
        comm.barrier()
        if comm.rank == 0:
            run_in_threads(threads, lambda number: [window.signal(1) for _ in range(count)], None)
        else:
            for _ in range(count * threads):
                window.wait_signal(0, timeout=10.0)
        comm.barrier()


def hold(window: Window, target: int, then: signal.Signals) -> None:
    """Send this process a signal inside an atomic."""
    memory = window._memory
    assert isinstance(memory, MappedWindow)
    with memory._parts[target].lock.held(time.monotonic() + 5.0, lambda: None):
        os.kill(os.getpid(), then)


@on_ranks(3, "shm", "ucx", killed=(1, 2))
def test_a_stopped_holder_of_a_lock_is_named_and_waiters_do_not_spin_and_a_killed_one_blocks_nobody(
    comm: Communicator,
) -> None:
    """The death of the target ends the wait at once."""
    pids = [int(pid) for pid in comm.all_gather_object(os.getpid())]
    window = comm.window(torch.zeros(4, dtype=torch.int64))
    comm.barrier()
    if comm.rank == 1:
        hold(window, 0, signal.SIGSTOP)
        hold(window, 2, signal.SIGSTOP)
        hold(window, 0, signal.SIGKILL)
    if comm.rank == 2:
        time.sleep(60.0)
    eventually(lambda: is_stopped(pids[1]))
    began, used = time.monotonic(), time.process_time()
    with pytest.raises(OpTimeout) as late:
        window.fetch_add(0, 0, 1, timeout=1.0)
    assert late.value.missing_ranks == (1,)
    assert time.process_time() - used < 0.7 * (time.monotonic() - began)
    os.kill(pids[1], signal.SIGCONT)
    assert window.fetch_add(0, 0, 1, timeout=10.0) == 0
    eventually(lambda: is_stopped(pids[1]))
    threading.Timer(0.2, lambda: os.kill(pids[2], signal.SIGKILL)).start()
    with pytest.raises(RegionGone, match="rank 2 is gone"):
        window.fetch_add(2, 0, 1, timeout=30.0)
    os.kill(pids[1], signal.SIGCONT)
    eventually(lambda: is_gone(comm.peers[1]))
    assert window.fetch_add(0, 0, 7, timeout=5.0) == 1


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


@on_ranks(1, "inproc")
def test_a_backend_without_windows_says_so(comm: Communicator) -> None:
    comm._windowed = False
    with pytest.raises(Unsupported, match=r"comms\.memory"):
        comm.window(torch.zeros(1))


@on_ranks(1, "inproc", "shm", *second_tier("ucx", "mpi", "gloo"))
def test_a_rank_moves_what_it_has_in_its_own_part_to_another_place_of_it(comm: Communicator) -> None:
    tensor = torch.arange(100_000)
    with comm.window(tensor) as window:
        window.put(tensor[:-1], comm.rank, 1)
        assert torch.equal(tensor[1:], torch.arange(99_999))
        window.get(tensor[:-1], comm.rank, 1)
        assert torch.equal(tensor[:-1], torch.arange(99_999))
        window.get(tensor[1:], comm.rank, 0)
        assert torch.equal(tensor[1:], torch.arange(99_999))


@on_ranks(2, of="windowed")
def test_a_closed_window_releases_its_tensor(comm: Communicator) -> None:
    """All tensors but the last are released: the communicator refers to its last window until it is closed."""
    tensors = []
    for _ in range(4):
        tensor = torch.zeros(1000)
        tensors.append(weakref.ref(tensor))
        with comm.window(tensor):
            comm.barrier()
        comm.barrier()
        del tensor
    gc.collect()
    assert sum(tensor() is not None for tensor in tensors) <= 1


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
    with pytest.raises(OverflowError):
        WindowBounds(torch.empty(0), (-1,))


class OneSignaller(WindowMemory):
    """A window in which rank 0 does something whenever the waiting rank looks whether it lives."""

    sizes = (0,)
    write = read = fetch_add = compare_swap = signal = flush = lambda self, *_: 0  # type: ignore[assignment]

    def __init__(self, at_look: Callable[[OneSignaller], None]) -> None:
        super().__init__(1)
        self.arrived = 0
        self._at_look = at_look

    def count_signals(self, rank: int) -> int:
        return self.arrived

    def check_live(self, rank: int) -> None:
        self._at_look(self)

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


# -- requests and replies, over a channel in this process: no rank is needed to see what an owner refuses


ROOM = 32
INTEGERS = st.integers(-(2**63), 2**63 - 1)


class Wire(requests.Channel):
    """Passes frames to the other ranks' services at once, or keeps those to the ranks that are `stopped`."""

    def __init__(self, rank: int, services: list[requests.RequestService]) -> None:
        self.broken: set[int] = set()
        self.stopped: set[int] = set()
        self.kept: list[Callable[[], None]] = []
        self._rank, self._services = rank, services

    def send(self, rank: int, head: bytes, body: bytes | memoryview = b"") -> None:
        copy = bytearray(body)
        if rank in self.stopped:
            self.kept.append(lambda: self._services[rank].requests.received(self._rank, head, copy))
        else:
            self._services[rank].requests.received(self._rank, head, copy)

    def close(self) -> None: ...


class Pair:
    """Rank 0, which asks, and rank 1, which owns `memory` of 32 bytes."""

    def __init__(self) -> None:
        liveness = Liveness((), 0)
        services: list[requests.RequestService] = []
        self.wires = [Wire(rank, services) for rank in range(2)]
        for rank in range(2):
            watch = PeerWatch(liveness, tuple)
            services.append(requests.RequestService(rank, 2, watch, lambda received, rank=rank: self.wires[rank]))
        self.services = services
        both = SimpleNamespace(size=2, all_gather=lambda outputs, mine, deadline: [out.copy_(mine) for out in outputs])
        self.memory = torch.zeros(4, dtype=torch.int64)
        self.theirs, self.mine = (
            service.window(both, tensor, soon())  # type: ignore[arg-type]
            for service, tensor in zip(services, (torch.zeros(4, dtype=torch.int64), self.memory), strict=True)
        )


@pytest.fixture
def pair() -> Pair:
    return Pair()


@given(
    st.sampled_from([PUT, GET, ADD, SWAP, SIGNAL, 99]),
    st.integers(0, ROOM + 9) | st.integers(2**62, 2**63),
    st.integers(0, ROOM + 9) | st.integers(PIECE_BYTES, 2**63),
    st.sampled_from([0, 3, 4, 8]),
    st.integers(0, ROOM + 9),
    st.booleans(),
)
def test_a_request_outside_the_memory_is_refused(
    kind: int, offset: int, nbytes: int, width: int, body: int, writable: bool
) -> None:
    exposed = Exposed(ExposedMemory(torch.zeros(ROOM, dtype=torch.uint8)), writable, size=int(writable))
    request = Head(kind, 1, 1, width, offset, nbytes)
    size = width if kind in (ADD, SWAP) else nbytes
    fits = kind != 99 and offset + size <= ROOM and (kind not in (ADD, SWAP) or width in (4, 8))
    fits = fits and (writable or kind == GET)
    assert (request.fault(exposed, body) == "") == (fits and body == (nbytes if kind == PUT else 0))
    assert Head.decode(request.encode()) == request


@given(st.sampled_from([ADD, SWAP]), st.sampled_from([4, 8]), st.integers(0, ROOM - 8), st.tuples(INTEGERS, INTEGERS))
def test_an_integer_is_added_to_and_swapped_as_in_a_model(
    kind: int, width: int, offset: int, values: tuple[int, int]
) -> None:
    memory, (first, second) = torch.zeros(ROOM, dtype=torch.uint8), values
    request = Head(kind, 1, 1, width, offset, 0, first, second)
    assert Exposed(ExposedMemory(memory), size=1).carry_out(0, Head.decode(request.encode()), b"") == (0, b"")
    becomes = first if kind == ADD else second if first == 0 else 0
    integer = (becomes % 2 ** (8 * width)).to_bytes(width, "little")
    assert bytes(memory.tolist()) == bytes(offset) + integer + bytes(ROOM - offset - width)


def test_a_put_that_arrives_in_the_memory_leaves_it_when_the_window_is_closed(pair: Pair) -> None:
    """What arrives late is written into memory that the tensor has left."""
    owner, head = pair.services[1].requests, Head(PUT, 1, 1, offset=8, nbytes=8).encode()
    place = owner.room(0, head, 8)
    assert place is not None and owner.room(0, Head(PUT, 1, 1, offset=32, nbytes=8).encode(), 8) is None
    torch.frombuffer(place, dtype=torch.uint8).fill_(1)
    owner.received(0, head, place)
    assert pair.memory.tolist() == [0, 0x0101010101010101, 0, 0]
    late = owner.room(0, head, 8)
    assert late is not None
    pair.mine.close()
    torch.frombuffer(late, dtype=torch.uint8).fill_(0)
    owner.received(0, head, late)
    assert pair.memory.tolist() == [0, 0x0101010101010101, 0, 0]


@given(st.binary(max_size=2 * HEAD.size) | st.binary(min_size=HEAD.size, max_size=HEAD.size), st.binary(max_size=40))
def test_bytes_that_are_no_request_change_nothing_but_the_window_that_they_name(text: bytes, body: bytes) -> None:
    pair = Pair()
    pair.services[1].requests.received(0, text, bytearray(body))
    assert pair.memory.tolist() == [0] * 4
    pair.theirs.signal(1, soon())
    pair.mine.wait_signal(0, soon())
    assert pair.mine.count_signals(0) == 1


@given(st.lists(st.sampled_from([PUT, SIGNAL]), max_size=12), st.randoms())
def test_a_signal_counts_once_the_posted_puts_before_it_are_done(calls: list[int], order: random.Random) -> None:
    """Whatever the order is in which a network brings them."""
    exposed = Exposed(ExposedMemory(torch.zeros(1, dtype=torch.uint8)), size=1)
    sent, puts = [], 0
    for kind in calls:
        puts += kind == PUT
        sent.append(Head(kind, 1, nbytes=int(kind == PUT), first=1 if kind == PUT else puts))
    order.shuffle(sent)
    done = []
    for head in sent:
        exposed.carry_out(0, head, bytearray(b"x"))
        done.append(head)
        arrived = sum(each.kind == PUT for each in done)
        assert exposed.signalled[0] == sum(each.kind == SIGNAL and each.first <= arrived for each in done)


def test_the_answer_to_a_get_that_was_given_up_reaches_nobody_and_a_put_after_the_close_writes_nothing(
    pair: Pair,
) -> None:
    got = torch.full((4,), 7)
    pair.wires[0].stopped.add(1)
    for call, tensor in ((pair.theirs.read, got), (pair.theirs.write, torch.ones_like(got))):
        with pytest.raises(OpTimeout) as late:
            call(1, 0, tensor, time.monotonic() + 0.01)
        assert late.value.missing_ranks == (1,)
    deliver_get, deliver_put = pair.wires[0].kept
    deliver_get()
    assert got.tolist() == [7] * 4
    pair.mine.close()
    deliver_put()
    assert pair.memory.tolist() == [0] * 4 and not pair.services[0].requests._pending
    with pytest.raises(RegionGone, match="rank 1 has closed"):
        pair.theirs.signal(1, soon())


def test_a_put_that_waited_for_a_window_to_close_writes_nothing(pair: Pair) -> None:
    """Its thread has found the window, and gets the lock after the close."""
    exposed, owner, outcomes = pair.mine._mine, pair.services[1].requests, []
    pair.mine.close()
    owner.expose(1, exposed)
    pair.wires[1].send = lambda rank, head, body=b"": outcomes.append(Head.decode(head).detail)  # type: ignore[method-assign]
    owner.received(0, Head(PUT, 1, 1, nbytes=ROOM).encode(), bytearray(b"1" * ROOM))
    assert outcomes == [requests.GONE] and pair.memory.tolist() == [0] * 4


def test_a_broken_connection_ends_calls_to_that_rank_alone(pair: Pair) -> None:
    pair.wires[0].broken.add(1)
    with pytest.raises(RegionGone, match="rank 1 has ended its connection"):
        pair.theirs.signal(1, soon())
    with pytest.raises(RegionGone, match="rank 1 has ended its connection"):
        pair.theirs.wait_signal(1, soon())
    pair.theirs.signal(0, soon())
