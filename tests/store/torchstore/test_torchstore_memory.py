"""The memory of a torchstore store: extents that never overlap, and are free when nothing needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import memory
from holdfast.store.torchstore.service.memory import ALIGNMENT, CHUNK_BYTES, Extents, StoreMemory, rounded
from holdfast.store.torchstore.service.records import Location

SIZE = 40 * ALIGNMENT


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT), st.integers(0, 100)), max_size=60))
def test_extents_never_overlap_and_all_of_them_freed_are_one_again(
    steps: list[tuple[bool, int, int]],
) -> None:
    extents, taken = Extents(SIZE), {}
    for takes, nbytes, which in steps:
        if takes:
            start = extents.take(nbytes)
            if start is None:
                continue
            assert start % ALIGNMENT == 0 and start + nbytes <= SIZE
            assert all(start >= s + n or start + nbytes <= s for s, n in taken.items())
            taken[start] = nbytes
        elif taken:
            start = sorted(taken)[which % len(taken)]
            extents.give(start, taken.pop(start))
        assert extents.free == SIZE - sum(map(rounded, taken.values()))
    for start, nbytes in taken.items():
        extents.give(start, nbytes)
    assert extents.take(SIZE) == 0


@pytest.fixture
def store() -> Iterator[StoreMemory]:
    with memory("inproc") as plane:
        kept = StoreMemory(plane)
        yield kept
        kept.close()


def take(store: StoreMemory, *sizes: int) -> list[Location]:
    while (taken := store.take(sizes)) is None:
        store.add(store.allocate(sizes))
    return taken


def test_an_extent_is_given_away_again_once_its_last_user_is_gone(store: StoreMemory) -> None:
    (first,) = take(store, 1000)
    store.use([first])
    store.release([first])
    (second,) = take(store, 1000)
    assert second != first
    store.release([first])
    assert take(store, 1000) == [first]


def test_what_is_taken_together_lies_in_one_chunk(store: StoreMemory) -> None:
    assert store.take([1]) is None
    assert {each.chunk for each in take(store, *[5000] * 20)} == {1}
    assert {each.chunk for each in take(store, *[CHUNK_BYTES // 2] * 3)} == {2}
    assert {each.chunk for each in take(store, 5000)} == {1}
    assert store.held >= store.used > 3 * CHUNK_BYTES // 2


def test_without_room_for_all_none_are_taken(store: StoreMemory) -> None:
    places = take(store, *[CHUNK_BYTES // 4] * 4)
    store.release(places[::2])
    used = store.used
    assert store.take([CHUNK_BYTES // 4, CHUNK_BYTES // 8, CHUNK_BYTES // 7]) is None
    assert store.used == used
    assert store.take([CHUNK_BYTES // 4] * 2) == places[::2]


def test_memory_that_was_needed_serves_the_next_value_and_more_than_that_goes(store: StoreMemory) -> None:
    first, second, third = (take(store, CHUNK_BYTES)[0] for _ in range(3))
    held = store.held
    store.release([first])
    assert take(store, CHUNK_BYTES) == [first] and store.held == held
    store.release([first, second, third])
    assert store.used == 0 and store.held == CHUNK_BYTES


def test_an_extent_that_was_not_taken_cannot_be_used(store: StoreMemory) -> None:
    for misuse in (store.use, store.release):
        with pytest.raises(CorruptData):
            misuse([Location(1, 0)])
