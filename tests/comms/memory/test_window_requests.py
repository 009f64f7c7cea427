"""Requests and replies of windows, over a channel in this process. No rank is needed to see what an owner refuses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import OpTimeout, RegionGone
from holdfast.comms.onesided import requests
from holdfast.comms.onesided.requests import (
    ADD,
    GET,
    HEAD,
    PIECE_BYTES,
    PUT,
    SIGNAL,
    SWAP,
    Channel,
    Exposed,
    Head,
    RequestService,
)
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.transport.liveness import Liveness, PeerWatch

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
            self.kept.append(lambda: self._services[rank].requests.received(self._rank, head, copy))
        else:
            self._services[rank].requests.received(self._rank, head, copy)

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


def test_an_owner_answers_wrong_requests_and_unknown_windows(pair: Pair) -> None:
    outcomes = []
    pair.wires[1].send = lambda rank, head, body=b"": outcomes.append(Head.decode(head).detail)  # type: ignore[method-assign]
    for request in (Head(GET, 1, 1, nbytes=33), Head(99, 1, 2), Head(PUT, 1, 3, offset=24, nbytes=16), Head(GET, 9, 4)):
        pair.services[1].requests.received(0, request.encode(), bytearray())
    assert outcomes == [requests.REFUSED] * 3 + [requests.GONE]


def test_the_answer_to_a_get_that_was_given_up_reaches_nobody(pair: Pair) -> None:
    got = torch.full((4,), 7)
    pair.wires[0].stopped.add(1)
    with pytest.raises(OpTimeout) as late:
        pair.theirs.read(1, 0, got, time.monotonic() + 0.01)
    assert late.value.missing_ranks == (1,)
    for deliver in pair.wires[0].kept:
        deliver()
    assert got.tolist() == [7] * 4 and not pair.services[0].requests._pending


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
