"""The ucx backend's channel for requests: an owner moves bytes within its regions only, whatever a message asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided import UcxChannel
from holdfast.backends.ucx.worker import Transports, UcxWorker
from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.comms.onesided.requests import (
    ADD,
    GET,
    GONE,
    PIECE_BYTES,
    PUT,
    REFUSED,
    SWAP,
    Exposed,
    Head,
    Owner,
    Pending,
    Requests,
)
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import span

SIZE, REGION, READ_ONLY, NO_REGION = 64, 7, 8, 9
DONE = 0


class Refused(HoldfastError):
    def __init__(self, outcome: int) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class Itself(Owner):
    """A worker that is connected to itself, so that it answers its own requests."""

    def __init__(self, over: Transports = Transports("tcp,self", {}, local=False, emulated=True)) -> None:  # noqa: B008
        self.worker = UcxWorker(libucp.FEATURE_AM, over, lambda key, why: None)
        self.requests = Requests(partial(UcxChannel, self.worker, threading.RLock()))
        self.to = self.worker.connect(self.worker.address, 1)
        self.memory = torch.zeros(SIZE, dtype=torch.uint8)
        for region in (REGION, READ_ONLY):
            self.requests.expose(region, Exposed(ExposedMemory(self.memory), region == REGION))

    def check_live(self) -> None: ...

    def error(self, outcome: int, op: str) -> HoldfastError:
        return Refused(outcome)

    def late(self, op: str, seconds: float) -> OpTimeout:
        return OpTimeout(op, 0, seconds)

    def outcome(self, pending: Pending) -> int:
        try:
            self.requests.finish(pending, time.monotonic() + 10.0, "request")
        except Refused as error:
            return error.outcome
        return DONE


@pytest.fixture(scope="module")
def owner() -> Iterator[Itself]:
    made = Itself()
    yield made
    made.worker.close()


offsets = st.one_of(st.integers(0, 2 * SIZE), st.integers(0, 2**64 - 1))
regions = st.sampled_from([REGION, READ_ONLY, NO_REGION])


def expected(region: int, offset: int, nbytes: int, writing: bool) -> int:
    """The owner's answer to a request for these bytes."""
    if region == NO_REGION:
        return GONE
    return REFUSED if offset + nbytes > SIZE or (writing and region == READ_ONLY) else DONE


@given(region=regions, offset=offsets, nbytes=st.integers(0, 2 * SIZE), writing=st.booleans())
def test_bytes_within_a_region_are_moved_and_no_others(
    owner: Itself, region: int, offset: int, nbytes: int, writing: bool
) -> None:
    owner.memory.copy_(torch.arange(SIZE))
    before, mine = owner.memory.clone(), torch.full((2 * SIZE,), 200, dtype=torch.uint8)
    if writing:
        pending = owner.requests.begin(
            owner, Head(PUT, region, offset=offset, nbytes=nbytes), body=bytes([200]) * nbytes
        )
    else:
        pending = owner.requests.begin(owner, Head(GET, region, offset=offset, nbytes=nbytes), into=mine.data_ptr())
    outcome = owner.outcome(pending)
    assert outcome == expected(region, offset, nbytes, writing)
    if outcome == DONE and writing:
        before[offset : offset + nbytes] = 200
    elif outcome == DONE:
        assert torch.equal(mine[:nbytes], before[offset : offset + nbytes])
        assert (mine[nbytes:] == 200).all()
    assert torch.equal(owner.memory, before)


@given(
    region=regions,
    offset=offsets,
    width=st.sampled_from([0, 1, 2, 4, 8, 255]),
    kind=st.sampled_from([ADD, SWAP]),
    values=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
)
def test_an_integer_is_added_to_and_swapped_as_in_a_model(
    owner: Itself, region: int, offset: int, width: int, kind: int, values: tuple[int, int]
) -> None:
    owner.memory.zero_()
    first, second = values
    pending = owner.requests.begin(owner, Head(kind, region, detail=width, offset=offset, first=first, second=second))
    outcome = owner.outcome(pending)
    if width not in (4, 8) and region != NO_REGION:
        assert outcome == REFUSED
    else:
        assert outcome == expected(region, offset, width, writing=True)
    found = bytes(owner.memory.tolist())
    if outcome == DONE:
        becomes = first if kind == ADD else second if first == 0 else 0
        assert pending.value == 0
        assert found[offset : offset + width] == (becomes % 2 ** (8 * width)).to_bytes(width, "little")
        assert not any(found[:offset]) and not any(found[offset + width :])
    else:
        assert not any(found)


@given(number=st.integers(0, 3), header=st.binary(max_size=96), payload=st.binary(max_size=300))
def test_spoilt_messages_change_nothing(owner: Itself, number: int, header: bytes, payload: bytes) -> None:
    owner.memory.copy_(torch.arange(SIZE))
    ffi, call = owner.worker.lib.ffi, owner.worker.lib.call
    source = ffi.from_buffer(payload)
    params = ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": libucp.AM_COPY_HEADER})
    at = int(ffi.cast("uintptr_t", source))
    request = call.ucp_am_send_nbx(owner.to, number, header, len(header), at, len(payload), params)
    owner.worker.finish(request, 5.0)
    assert owner.outcome(owner.requests.begin(owner, Head(GET, REGION, nbytes=8))) == DONE, (
        "valid requests are answered"
    )
    assert torch.equal(owner.memory, torch.arange(SIZE, dtype=torch.uint8))


def test_where_the_network_reads_memory_a_large_body_stays_with_its_sender_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A put goes straight into the region. One that does not fit is refused, and changes nothing."""
    read = list[int]()
    begin = UcxChannel._receive_body
    monkeypatch.setattr(UcxChannel, "_receive_body", lambda self, *of: (read.append(of[-1]), begin(self, *of))[1])
    owner = Itself(Transports("posix,cma,ib,self", {"RNDV_THRESH": "64k"}, local=False, emulated=False))
    count, deadline = PIECE_BYTES + 1000, time.monotonic() + 20.0
    memory, source = torch.zeros(count, dtype=torch.uint8), (torch.arange(count) % 251).to(torch.uint8)
    owner.requests.expose(12, Exposed(ExposedMemory(memory)))
    owner.requests.write(owner, 12, 0, span(source), source, deadline, "put")
    assert torch.equal(memory, source) and PIECE_BYTES in read
    got, zeros = torch.zeros_like(source), torch.zeros_like(source)
    owner.requests.read(owner, 12, 0, span(got), got, deadline, "get")
    assert torch.equal(got, source)
    with pytest.raises(Refused):
        owner.requests.write(owner, 12, 2000, span(zeros), zeros, deadline, "put")
    assert torch.equal(memory, source)
    owner.worker.close()
