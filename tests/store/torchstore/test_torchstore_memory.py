"""The memory of a torchstore store: a grant has one user at a time, and is free when nothing needs it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.torchstore import record
from holdfast.store.torchstore.record import EMPTY, SPARE_BYTES, Slab, StoreRecord

ME = Peer("host", 1, 1)


def granted(now: StoreRecord, nbytes: int) -> StoreRecord:
    """The memory after the owner has added a slab for a claim."""
    size, count = record.sizes(nbytes)
    first = max((each.first + each.count for each in now.slabs), default=1)
    return record.add(now, Slab(first, Handle("shm", b"", size * count), size, count))


def grant_of(now: StoreRecord, claim: int) -> int | None:
    """The memory that a claim fills; None while it waits."""
    found = now.claim_of(claim)
    return found.grants[0] if found and found.grants else None


class _Puts(RuleBasedStateMachine):
    """Puts and reads, each a claim. `used` is what the directory has: the grants in which values lie."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.used, self.last = EMPTY, set[int](), 0
        self.filling, self.reading = dict[int, int](), dict[int, set[int]]()

    @rule(nbytes=st.sampled_from([1000, 100_000, 1 << 20]))
    def begin_a_put(self, nbytes: int) -> None:
        self.last += 1
        self.claim(self.last, nbytes)

    def claim(self, id_: int, nbytes: int, ahead: bool = False) -> None:
        self.now = record.claim(self.now, id_, ME, nbytes, self.used, ahead)
        if grant_of(self.now, id_) is None:
            self.now = granted(self.now, nbytes)
        found = grant_of(self.now, id_)
        assert found is not None and self.now.slab_of(found).size >= nbytes
        assert found not in {*self.used, *self.filling.values()}.union(*self.reading.values())
        self.filling[id_] = found

    @precondition(lambda self: self.filling)
    @rule(commits=st.booleans(), goes_on=st.booleans(), data=st.data())
    def end_a_put(self, commits: bool, goes_on: bool, data: Any) -> None:
        """Its claim ends, or is one on memory for the next put."""
        claim = data.draw(st.sampled_from(sorted(self.filling)))
        grant = self.filling.pop(claim)
        if commits:
            self.used.add(grant)
        if goes_on:
            self.claim(claim, 100_000, ahead=True)
        else:
            self.now = record.release(self.now, {claim})

    @precondition(lambda self: self.used)
    @rule()
    def begin_a_read(self) -> None:
        self.last += 1
        self.reading[self.last] = set(self.used)
        self.now = record.lease(self.now, self.last, ME, sorted(self.used))

    @precondition(lambda self: self.reading)
    @rule()
    def end_a_read(self) -> None:
        claim, _ = self.reading.popitem()
        self.now = record.release(self.now, {claim})

    @precondition(lambda self: self.used)
    @rule()
    def delete_a_value(self) -> None:
        self.used.pop()

    @rule()
    def let_go_what_is_too_much(self) -> None:
        self.now = record.without_surplus(self.now, self.used)

    @invariant()
    def what_is_needed_is_there(self) -> None:
        there = {grant for slab in self.now.slabs for grant in slab.grants}
        assert there >= {*self.used, *self.filling.values()}.union(*self.reading.values())


TestPuts = _Puts.TestCase


def test_memory_of_a_replaced_value_serves_the_next_one_of_about_its_size() -> None:
    now = record.release(granted(record.claim(EMPTY, 1, ME, 8 << 20, ()), 8 << 20), {1})
    for nbytes, found in ((8 << 20, 1), (5 << 20, 1), (1000, None), (9 << 20, None)):
        assert grant_of(record.claim(now, 2, ME, nbytes, ()), 2) == found, nbytes
    assert grant_of(record.claim(now, 2, ME, 8 << 20, {1}), 2) is None, "a value lies in it"


def test_small_puts_share_a_slab() -> None:
    now = granted(record.claim(EMPTY, 0, ME, 5000, ()), 5000)
    for number in range(1, 64):
        now = record.claim(now, number, ME, 5000, ())
    assert [grant_of(now, number) for number in range(64)] == [*range(1, 65)]
    assert grant_of(record.claim(now, 64, ME, 5000, ()), 64) is None


def test_free_memory_beyond_what_is_in_use_goes() -> None:
    now = EMPTY
    for number in range(1, 5):
        now = granted(record.claim(now, number, ME, SPARE_BYTES, ()), SPARE_BYTES)
    assert record.without_surplus(now, ()) == now, "all are claimed"
    now = record.release(now, {1, 2, 3, 4})
    assert [each.first for each in record.without_surplus(now, {1, 2}).slabs] == [1, 2, 3, 4]
    assert [each.first for each in record.without_surplus(now, {1}).slabs] == [1, 4]
    assert [each.first for each in record.without_surplus(now, ()).slabs] == [4]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_memory(data: bytes) -> None:
    with pytest.raises(CorruptData):
        StoreRecord.decode(data)
