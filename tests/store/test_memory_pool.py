"""The memory of a store's parts: reserved before it is needed, and used again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from holdfast.comms.memory_plane import MemoryPlane, memory
from holdfast.store.errors import StoreFull
from holdfast.store.holding.memory_pool import MOST_SPARE, MemoryPool

NBYTES = 1 << 20


@pytest.fixture
def plane() -> Iterator[MemoryPlane]:
    with memory("shm") as opened:
        yield opened


@pytest.mark.parametrize("count", [1, 3, MOST_SPARE + 2])
def test_reserved_memory_is_there_for_so_many_parts_at_once(
    plane: MemoryPlane, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    made: list[int] = []
    empty = plane.empty

    def counted(nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        made.append(nbytes)
        return empty(nbytes, mappable=mappable)

    monkeypatch.setattr(plane, "empty", counted)
    pool = MemoryPool(plane, None)
    pool.reserve(NBYTES, count)
    assert len(made) == count
    parts = [pool.allocate(NBYTES, time.monotonic(), version) for version in range(count)]
    assert len(made) == count
    assert len({part.data_ptr() for part in parts}) == count
    pool.close()


def test_a_reserve_beyond_the_limit_is_refused_and_leaves_its_memory_to_parts(plane: MemoryPlane) -> None:
    pool = MemoryPool(plane, 2 * NBYTES)
    with pytest.raises(StoreFull):
        pool.reserve(NBYTES, 3)
    assert pool.used == 0
    assert pool.allocate(NBYTES, time.monotonic(), 1).nbytes == NBYTES
    pool.close()
