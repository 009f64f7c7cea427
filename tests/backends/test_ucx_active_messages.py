"""Active messages of the ucx backend: an owner moves bytes within its regions only, whatever a message asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided import active_messages
from holdfast.backends.ucx.onesided.active_messages import ActiveMessages, ActiveRequest, ExposedRange
from holdfast.backends.ucx.worker import Transports, UcxWorker
from holdfast.comms.tensors.exposed import ExposedMemory

SIZE, REGION, READ_ONLY = 64, 7, 8


class LoopbackWorker:
    """A worker that is connected to itself, so that it answers its own requests."""

    def __init__(self) -> None:
        self.worker = UcxWorker(libucp.FEATURE_AM, Transports("tcp,self", {}, False, True), lambda key, why: None)
        self.messages = ActiveMessages(self.worker)
        self.endpoint = self.worker.connect(self.worker.address, 1)
        self.memory = torch.zeros(SIZE, dtype=torch.uint8)
        self.notes: list[tuple[int, int, int, int]] = []
        for region in (REGION, READ_ONLY):
            self.messages.expose(
                region, ExposedRange(ExposedMemory(self.memory), region == REGION, lambda sender: None, self._noted)
            )

    def _noted(self, *note: int) -> bool:
        self.notes.append(note)  # type: ignore[arg-type]
        return True

    def until(self, done: Callable[[], bool], seconds: float = 5.0) -> bool:
        limit = time.monotonic() + seconds
        while not done() and time.monotonic() < limit:
            self.worker.progress()
            self.messages.sweep()
        return done()

    def finish(self, ask: ActiveRequest) -> int:
        assert self.until(lambda: ask.status != active_messages.WAITING)
        return ask.status


@pytest.fixture(scope="module")
def loopback() -> Iterator[LoopbackWorker]:
    worker = LoopbackWorker()
    yield worker
    worker.worker.close()


offsets = st.one_of(st.integers(0, 2 * SIZE), st.integers(0, 2**64 - 1))
regions = st.sampled_from([REGION, READ_ONLY, 9])


def expected(region: int, offset: int, nbytes: int, writing: bool) -> int:
    """The owner's answer to a request for these bytes."""
    if region == 9:
        return active_messages.GONE
    if offset + nbytes > SIZE or (writing and region == READ_ONLY):
        return active_messages.REFUSED
    return active_messages.DONE


@given(region=regions, offset=offsets, nbytes=st.integers(0, 2 * SIZE), writing=st.booleans())
def test_bytes_within_a_region_are_moved_and_no_others(
    loopback: LoopbackWorker, region: int, offset: int, nbytes: int, writing: bool
) -> None:
    loopback.memory.copy_(torch.arange(SIZE))
    before, mine = loopback.memory.clone(), torch.full((2 * SIZE,), 200, dtype=torch.uint8)
    if writing:
        ask = loopback.messages.write(loopback.endpoint, region, offset, mine.data_ptr(), nbytes, mine)
    else:
        ask = loopback.messages.read(loopback.endpoint, region, offset, mine.data_ptr(), nbytes)
    assert loopback.finish(ask) == expected(region, offset, nbytes, writing)
    if ask.status == active_messages.DONE and writing:
        before[offset : offset + nbytes] = 200
    elif ask.status == active_messages.DONE:
        assert torch.equal(mine[:nbytes], before[offset : offset + nbytes])
        assert (mine[nbytes:] == 200).all()
    assert torch.equal(loopback.memory, before)


@given(
    region=regions,
    offset=offsets,
    width=st.sampled_from([0, 1, 2, 4, 8, 255]),
    kind=st.sampled_from([active_messages.ADD, active_messages.SWAP]),
    values=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
)
def test_an_integer_is_added_to_and_swapped_as_in_a_model(
    loopback: LoopbackWorker, region: int, offset: int, width: int, kind: int, values: tuple[int, int]
) -> None:
    loopback.memory.zero_()
    ask = loopback.messages.update(loopback.endpoint, kind, region, offset, width, values)
    status = loopback.finish(ask)
    if width not in (4, 8) and region != 9:
        assert status == active_messages.REFUSED
    else:
        assert status == expected(region, offset, width, writing=True)
    found = bytes(loopback.memory.tolist())
    if status == active_messages.DONE:
        becomes = values[0] if kind == active_messages.ADD else values[1] if values[0] == 0 else 0
        assert ask.value == 0
        assert found[offset : offset + width] == (becomes % 2 ** (8 * width)).to_bytes(width, "little")
        assert not any(found[:offset]) and not any(found[offset + width :])
    else:
        assert not any(found)


@given(number=st.integers(0, 3), header=st.binary(max_size=96), payload=st.binary(max_size=300))
def test_spoilt_messages_change_nothing(loopback: LoopbackWorker, number: int, header: bytes, payload: bytes) -> None:
    loopback.memory.copy_(torch.arange(SIZE))
    ffi, call = loopback.worker.lib.ffi, loopback.worker.lib.call
    source = ffi.from_buffer(payload)
    params = ffi.new("ucp_request_param_t *", {"op_attr_mask": libucp.ATTR_FLAGS, "flags": libucp.AM_COPY_HEADER})
    at = int(ffi.cast("uintptr_t", source))
    request = call.ucp_am_send_nbx(loopback.endpoint, number, header, len(header), at, len(payload), params)
    loopback.worker.finish(request, 5.0)
    ask = loopback.messages.read(loopback.endpoint, REGION, 0, loopback.memory.data_ptr(), 8)
    assert loopback.finish(ask) == active_messages.DONE, "valid requests are still answered"
    assert torch.equal(loopback.memory, torch.arange(SIZE, dtype=torch.uint8))


def test_a_late_answer_writes_nowhere(loopback: LoopbackWorker) -> None:
    into = torch.zeros(8, dtype=torch.uint8)
    loopback.memory.fill_(1)
    forgotten = loopback.messages.read(loopback.endpoint, REGION, 0, into.data_ptr(), 8)
    loopback.messages.forget(forgotten)
    other = torch.zeros(8, dtype=torch.uint8)
    assert (
        loopback.finish(loopback.messages.read(loopback.endpoint, REGION, 0, other.data_ptr(), 8))
        == active_messages.DONE
    )
    assert (other == 1).all()
    assert (into == 0).all()


def test_a_withdrawn_region_is_not_touched(loopback: LoopbackWorker) -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    loopback.messages.expose(11, ExposedRange(ExposedMemory(memory), True))
    source = torch.ones(8, dtype=torch.uint8)
    under_way = loopback.messages.write(loopback.endpoint, 11, 0, source.data_ptr(), 8, source)
    arrived = under_way.status == active_messages.DONE
    loopback.messages.withdraw(11)
    assert loopback.finish(under_way) == (active_messages.DONE if arrived else active_messages.GONE)
    assert memory.any() == arrived


def test_a_note_reaches_the_owner_as_it_was_sent(loopback: LoopbackWorker) -> None:
    loopback.notes.clear()
    ask = loopback.messages.note(loopback.endpoint, REGION, sender=3, word=5, value=-9, after=2)
    assert loopback.finish(ask) == active_messages.DONE
    assert loopback.notes == [(3, 5, -9, 2)]
