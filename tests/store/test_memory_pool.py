"""The memory of a store's parts: touched before it is needed, and used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from holdfast.backends.inproc.transport import InprocPlane
from holdfast.comms.errors import Unsupported
from holdfast.comms.memory_plane import memory
from holdfast.store import WeightStore
from holdfast.store.data.delta import diff
from holdfast.store.holding import memory_pool
from holdfast.store.holding.memory_pool import AHEAD, MemoryPool, available_memory
from support.waiting import PATIENCE, eventually

NBYTES = 1 << 20
KEEP = 2


class CountingPlane(InprocPlane):
    """Counts what is allocated; each allocation of a thread other than the test's waits for `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.improved: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_full = False

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(PATIENCE)
            if self.is_full:
                raise OSError("no memory")
        self.made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def improve(self, memory: torch.Tensor) -> None:
        self.improved.append(memory.data_ptr())


@pytest.fixture
def plane() -> Iterator[CountingPlane]:
    with CountingPlane() as opened:
        yield opened


@pytest.fixture
def pool(plane: CountingPlane) -> Iterator[MemoryPool]:
    opened = MemoryPool(plane, None, KEEP + 1)
    yield opened
    opened.close()


def take(pool: MemoryPool, version: int, nbytes: int = NBYTES) -> torch.Tensor:
    """Take memory for a part, as a publish that is safe afterwards."""
    memory = pool.allocate(nbytes, time.monotonic(), version)
    pool.touch_ahead()
    return memory


def is_idle(pool: MemoryPool) -> bool:
    return pool._toucher is None


def publish_versions(pool: MemoryPool, count: int) -> None:
    """Take and give back memory as a store does that keeps two versions."""
    parts: list[torch.Tensor] = []
    for version in range(count):
        parts.append(take(pool, version))
        if len(parts) > KEEP:
            pool.give_back(parts.pop(0))


# Touched beside the program -------------------------------------------------------------------------------------------


def test_memory_of_two_more_versions_is_touched_once_sizes_are_known(plane: CountingPlane, pool: MemoryPool) -> None:
    part = take(pool, 1)
    eventually(lambda: is_idle(pool))
    assert plane.made == [NBYTES] * (1 + AHEAD)
    assert part.data_ptr() in plane.improved
    assert len(set(plane.improved)) == 1 + AHEAD, "also what is in use"
    assert pool.used == NBYTES, "what is touched ahead is not in use"
    for version in (2, 3):
        take(pool, version)
    assert len(plane.made) == 1 + AHEAD


def test_what_is_expected_is_touched_before_the_first_version(plane: CountingPlane, pool: MemoryPool) -> None:
    pool.touch_ahead(NBYTES + NBYTES // 64)
    eventually(lambda: is_idle(pool))
    assert len(plane.made) == AHEAD
    take(pool, 1)
    eventually(lambda: is_idle(pool))
    assert len(plane.made) == KEEP + 1, "the third, although the parts are smaller than was expected"


def test_versions_back_to_back_touch_memory_three_times_and_never_again(plane: CountingPlane, pool: MemoryPool) -> None:
    """A version that comes while its memory is being touched waits for that, and touches none besides."""
    publish_versions(pool, 12)
    eventually(lambda: is_idle(pool))
    assert len(plane.made) == KEEP + 1


def test_no_more_is_touched_than_the_limit_allows(plane: CountingPlane, pool: MemoryPool) -> None:
    pool.limit = 2 * NBYTES
    take(pool, 1)
    eventually(lambda: is_idle(pool))
    assert len(plane.made) == 2
    other = pool.allocate(NBYTES // 4, time.monotonic(), 1, part=False)
    assert other.nbytes == NBYTES // 4, "what was touched ahead makes room"


@pytest.mark.parametrize(("nbytes", "left"), [(NBYTES // 2, 1 << 40), (NBYTES, 2 * NBYTES - 1)], ids=["small", "half"])
def test_small_parts_are_touched_as_they_come_and_no_more_than_half_of_what_the_machine_has_left(
    plane: CountingPlane, pool: MemoryPool, nbytes: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "available_memory", lambda: left)
    take(pool, 1, nbytes)
    assert nbytes == NBYTES or (is_idle(pool) and not plane.improved)
    eventually(lambda: is_idle(pool))
    assert len(plane.made) == 1


def test_a_part_touches_what_no_thread_did_and_a_closed_pool_is_empty(plane: CountingPlane, pool: MemoryPool) -> None:
    plane.is_full = True
    publish_versions(pool, 3)
    assert len(plane.made) == 3
    eventually(lambda: is_idle(pool))
    assert pool.used == KEEP * NBYTES
    plane.gate.clear()
    take(pool, 1)
    plane.gate.set()
    pool.close()
    assert is_idle(pool) and not pool._spare


# On a real plane ------------------------------------------------------------------------------------------------------


def test_touching_ends_once_the_plane_is_closed() -> None:
    with memory("shm") as shm:
        pool = MemoryPool(shm, None, KEEP + 1)
        pool.touch_ahead(1 << 40)  # more than any machine has: the sizes that it may have are not a matter of this test
        assert is_idle(pool)
        pool.touch_ahead(256 << 20)
    pool.close()
    assert is_idle(pool)


def test_a_store_touches_what_it_expects_and_lets_it_go_when_it_closes() -> None:
    with WeightStore("memory://expects", expect=4 << 20) as store:
        pool = store._replica_holder.pool
        eventually(lambda: is_idle(pool) and len(pool._spare) == AHEAD)
        store.publish(1, {"weight": torch.ones(1 << 20)})
        eventually(lambda: is_idle(pool))
        assert pool._used == sum(each.nbytes for each in pool._spare) + pool.used < (KEEP + 2) * (4 << 20)
    assert not pool._spare


def test_a_store_that_does_not_hold_touches_memory_for_one_more_part(url: str) -> None:
    with WeightStore(url, replicas=1), WeightStore(url, replicas=1, hold=False) as store:
        store.publish(1, {"weight": torch.ones(1 << 20)})
        pool = store._replica_holder.pool
        eventually(lambda: is_idle(pool))
        assert 4 << 20 < pool._used <= 2 * (5 << 20)


def test_a_publish_that_fails_before_its_part_is_kept_gives_the_memory_back() -> None:
    def observe(kind: str, fields: dict[str, object]) -> None:
        if kind == "copied" and fields["version"] == 2:
            raise RuntimeError("of the caller")

    with WeightStore("memory://fails", observe=observe, limit=10 << 20) as store:
        store.publish(1, {"weight": torch.zeros(1 << 20)})
        used = store._replica_holder.pool.used
        for _ in range(3):
            with pytest.raises(RuntimeError, match="of the caller"):
                store.publish(2, {"weight": torch.ones(1 << 20)})
            assert store._replica_holder.pool.used == used


def test_a_delta_that_cannot_be_exposed_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightStore("memory://deltas") as store:
        state = {"weight": torch.zeros(1 << 20)}
        store.publish(1, state)
        holder = store._replica_holder
        (key,) = holder._kept
        used, memory = holder.pool.used, holder.memory_of(key)
        monkeypatch.setattr(holder._plane, "expose", Mock(side_effect=Unsupported("exposing", "")))
        with pytest.raises(Unsupported):
            holder.attach(key, diff(memory, memory, ()), key[2])
        assert holder.pool.used == used


def test_a_cgroup_bounds_what_is_available(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 100 kB\n")
    assert available_memory(tmp_path, groups) == 100 << 10
    (tmp_path / "self" / "cgroup").write_text("4:memory:/a\n0::/job\n")
    (groups / "job").mkdir(parents=True)
    (groups / "job" / "memory.max").write_text("max\n")
    (groups / "job" / "memory.current").write_text("5000\n")
    assert available_memory(tmp_path, groups) == 100 << 10
    (groups / "job" / "memory.max").write_text("9000\n")
    assert available_memory(tmp_path, groups) == 4000
