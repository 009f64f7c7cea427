"""Requests and replies of windows, over a channel in this process: no rank is needed to see what an owner refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import OpTimeout, RegionGone
from holdfast.comms.onesided import requests
from holdfast.comms.onesided.peer_watch import PeerWatch
from holdfast.comms.onesided.requests import ADD, GET, PIECE_BYTES, PUT, SIGNAL, SWAP, Channel, Head, RequestService
from holdfast.comms.transport.liveness import Liveness

ROOM = 32


class Wire(Channel):
    """Passes frames to the other ranks' services at once, or keeps those to the ranks that are `stopped`."""

    def __init__(self, rank: int, services: list[RequestService]) -> None:
        self.broken: set[int] = set()
        self.stopped: set[int] = set()
        self.kept: list[Callable[[], None]] = []
        self._rank, self._services = rank, services

    def send(self, rank: int, head: bytes, body: bytes | memoryview = b"") -> None:
        copy = bytearray(body)
        if rank in self.stopped:
            self.kept.append(lambda: self._services[rank]._received(self._rank, head, copy))
        else:
            self._services[rank]._received(self._rank, head, copy)

    def shut_down(self) -> None: ...

    def close(self) -> None: ...


class Group:
    """The two ranks, of which this test is both."""

    size = 2

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, deadline: float) -> None:
        for output in outputs:
            output.copy_(tensor)


class Pair:
    """Rank 0, which asks, and rank 1, which owns `memory` of 32 bytes."""

    def __init__(self) -> None:
        liveness = Liveness((), 0)
        services: list[RequestService] = []
        self.wires = [Wire(rank, services) for rank in range(2)]
        for rank in range(2):
            watch = PeerWatch(liveness, tuple)
            services.append(RequestService(rank, 2, watch, lambda received, rank=rank: self.wires[rank]))
        self.services = services
        self.memory = torch.zeros(4, dtype=torch.int64)
        self.theirs, self.mine = (
            service.window(Group(), tensor, soon())  # type: ignore[arg-type]
            for service, tensor in zip(services, (torch.zeros(4, dtype=torch.int64), self.memory), strict=True)
        )


def soon() -> float:
    return time.monotonic() + 10.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    yield Pair()


def test_puts_gets_atomics_and_signals_reach_the_owner(pair: Pair) -> None:
    pair.theirs.write(1, 8, torch.tensor([5, 6]), soon())
    assert pair.theirs.fetch_add(1, 0, torch.int64, 3, soon()) == 0
    assert pair.theirs.compare_swap(1, 0, torch.int64, 3, 4, soon()) == 3
    got = torch.empty(4, dtype=torch.int64)
    pair.theirs.read(1, 0, got, soon())
    assert got.tolist() == pair.memory.tolist() == [4, 5, 6, 0]
    pair.theirs.signal(1, soon())
    pair.mine.wait_signal(0, soon())
    pair.theirs.flush(None, soon())


@given(
    st.sampled_from([PUT, GET, ADD, SWAP, SIGNAL, 99]),
    st.integers(0, ROOM + 9) | st.integers(2**62, 2**63),
    st.integers(0, ROOM + 9) | st.integers(PIECE_BYTES, 2**63),
    st.sampled_from([0, 3, 4, 8]),
    st.integers(0, ROOM + 9),
)
def test_a_request_outside_the_window_is_refused_and_the_owner_goes_on(
    kind: int, offset: int, nbytes: int, width: int, body: int
) -> None:
    request = Head(kind, 1, 1, width, offset, nbytes)
    size = width if kind in (ADD, SWAP) else nbytes
    fits = kind != 99 and offset + size <= ROOM and (kind not in (ADD, SWAP) or width in (4, 8))
    assert (request.fault(ROOM, body) == "") == (fits and body == (nbytes if kind == PUT else 0))
    assert Head.decode(request.encode()) == request


def test_an_owner_answers_wrong_requests_and_unknown_windows(pair: Pair) -> None:
    outcomes = []
    pair.wires[1].send = lambda rank, head, body=b"": outcomes.append(Head.decode(head).detail)  # type: ignore[method-assign]
    for request in (Head(GET, 1, 1, nbytes=33), Head(99, 1, 2), Head(PUT, 1, 3, offset=24, nbytes=16), Head(GET, 9, 4)):
        pair.services[1]._received(0, request.encode(), bytearray())
    assert outcomes == [requests.REFUSED] * 3 + [requests.GONE]


def test_the_answer_to_a_get_that_was_given_up_reaches_nobody(pair: Pair) -> None:
    got = torch.full((4,), 7)
    pair.wires[0].stopped.add(1)
    with pytest.raises(OpTimeout) as late:
        pair.theirs.read(1, 0, got, time.monotonic() + 0.01)
    assert late.value.missing_ranks == (1,)
    for deliver in pair.wires[0].kept:
        deliver()
    assert got.tolist() == [7] * 4 and not pair.services[0]._pending


def test_a_put_that_comes_after_the_close_writes_nothing(pair: Pair) -> None:
    pair.wires[0].stopped.add(1)
    with pytest.raises(OpTimeout):
        pair.theirs.write(1, 0, torch.ones(4, dtype=torch.int64), time.monotonic() + 0.01)
    pair.mine.close()
    for deliver in pair.wires[0].kept:
        deliver()
    assert pair.memory.tolist() == [0] * 4
    with pytest.raises(RegionGone, match="rank 1 has closed"):
        pair.theirs.signal(1, soon())


def test_a_broken_connection_ends_calls_to_that_rank_alone(pair: Pair) -> None:
    pair.wires[0].broken.add(1)
    with pytest.raises(RegionGone, match="rank 1 has ended its connection"):
        pair.theirs.signal(1, soon())
    with pytest.raises(RegionGone, match="rank 1 has ended its connection"):
        pair.theirs.wait_signal(1, soon())
    pair.theirs.signal(0, soon())
