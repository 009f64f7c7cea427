"""The weight store in normal use and at its edges, also for asyncio. `test_store_faults.py` has the kills."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.tensor
from torch import nn

from holdfast.comms.errors import Mismatch, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import memory
from holdfast.store import (
    AsyncFollower,
    AsyncLease,
    AsyncWeightStore,
    CallCancelled,
    Follower,
    Lease,
    NoSuchVersion,
    StoreTimeout,
    WeightStore,
    weight_store,
)
from holdfast.store.data.digests import Words
from holdfast.store.data.manifest import PIECE_BYTES, CopyPiece
from holdfast.store.data.packing import PartBlock, pack
from holdfast.store.holding.memory_pool import AHEAD
from holdfast.store.read import filling
from holdfast.store.read.version_reader import VersionReader
from support.children import Start
from support.samples.store_processes import Holders, a_holder
from support.waiting import eventually
from support.weights.state_dicts import value_in, value_of, weights

# -- one process


def test_a_version_runs_through_the_modules_that_the_internals_list(store: WeightStore) -> None:
    assert torch.distributed.tensor is not None, "as in trainers, it is imported"
    state = weights(1.0)
    into = weights(0)
    store.publish(1, state), store.get(1, into)  # what is made once is made
    root, ran = Path(weight_store.__file__).parents[1], set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root / "store"):
            ran.add(str(path.relative_to(root)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        store.publish(2, state), store.get(2, into)
    finally:
        sys.setprofile(before)
    page = (root / "docs" / "internals" / "store-and-workload.md").read_text()
    assert ran == set(re.findall(r"^\| \d+ \| .+ \| `(store/.+\.py)` \|$", page, re.MULTILINE))


def test_a_published_version_can_be_read_and_does_not_change_with_its_source(store: WeightStore) -> None:
    model, other = nn.Linear(20, 30), nn.Linear(20, 30)
    published = {name: each.clone() for name, each in model.state_dict().items()}
    store.publish(7, model.state_dict())
    nn.init.zeros_(model.weight)
    assert store.get("latest", into=other.state_dict()) == 7
    assert all(torch.equal(each, published[name]) for name, each in other.state_dict().items())
    assert store.latest() == 7 and store.versions() == [7]
    assert [holder.pid for holder in store.holders(7)] == [os.getpid()]
    store.publish(8, {})
    assert store.get(8, {}) == 8, "a version may have no tensors"


def test_an_empty_store_has_no_versions(store: WeightStore) -> None:
    assert store.latest() is None and store.versions() == []
    for attempt in (lambda: store.get("latest", into=weights()), lambda: store.holders(), lambda: store.pin(3)):
        with pytest.raises(NoSuchVersion, match="wait"):
            attempt()
    with pytest.raises(StoreTimeout, match="none is visible"):
        store.wait(1, timeout=0.02)


def test_a_version_does_not_change(store: WeightStore) -> None:
    store.publish(1, weights(1.0))
    store.publish(1, dict(reversed(weights(1.0).items())))
    changed = weights(1.0)
    changed["b"][2, 4] = 7
    for other, what in [
        (changed, "values in or near a, b"),
        ({"a": weights()["a"]}, "lacks b"),
        ({**weights(), "c": torch.ones(1)}, "has c besides"),
        ({**weights(), "b": torch.ones(3, 5)}, r"b float32\[3, 5\], not b float64\[3, 5\]"),
    ]:
        with pytest.raises(Mismatch, match=f"version 1 .*cannot change.*{what}"):
            store.publish(1, other)
    assert value_in(store, 1) == 1 and store.versions() == [1]


def test_bad_arguments_are_refused(store: WeightStore) -> None:
    for version in (-1, 1 << 63):
        with pytest.raises(ValueError, match="version"):
            store.publish(version, weights())
    for part, parts in ((2, 2), (0, 0), (-1, 2)):
        with pytest.raises(ValueError, match="part"):
            store.publish(1, weights(), part=part, parts=parts)
    with pytest.raises(ValueError, match="latest"):
        store.get("newest", weights())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        WeightStore(store.url, keep=0)
    with pytest.raises(ValueError, match="one process"):
        WeightStore(store.url, replicas=2)
    with pytest.raises(ValueError, match="register"):
        WeightStore("nonsense")
    assert store.versions() == []


def test_the_newest_versions_stay(store: WeightStore) -> None:
    for version in range(1, 6):
        store.publish(version, weights(version))
    assert store.versions() == [4, 5] and value_in(store, 4) == 4
    with pytest.raises(NoSuchVersion, match="superseded") as caught:
        value_in(store, 2)
    assert caught.value.version == 2 and caught.value.there == (4, 5) and isinstance(caught.value, RegionGone)
    with pytest.raises(NoSuchVersion, match="nobody published"):
        value_in(store, 6)
    with pytest.raises(Mismatch, match="older than those that are kept"):
        store.publish(0, weights())
    with pytest.raises(Mismatch, match="use a new number"):
        store.publish(2, weights(99))


def test_a_version_that_goes_while_it_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checksum was right before. A reader may get no processor between the two."""
    with WeightStore(f"memory://{tmp_path}", keep=1) as store:
        store.publish(1, weights(1.0))
        copy_and_digest = filling.copy_and_digest

        def paused(jobs: Words, copies: Words) -> Words:
            sums = copy_and_digest(jobs, copies)
            for number in (2, 3):
                store.publish(number, weights(float(number)))
            copy_and_digest(jobs, copies)
            return sums

        monkeypatch.setattr(filling, "copy_and_digest", paused)
        with pytest.raises(NoSuchVersion):
            store.get(1, weights(0.0))


def test_a_pinned_version_stays_until_it_is_released(store: WeightStore) -> None:
    store.publish(1, weights(1))
    with store.pin("latest") as lease:
        assert lease.version == 1
        for version in (2, 3, 4):
            store.publish(version, weights(version))
        assert store.versions() == [1, 3, 4] and value_in(store, 1) == 1
        with pytest.raises(Mismatch, match=f"pinned by process {os.getpid()}"):
            store.delete(1)
    assert store.versions() == [3, 4]
    lease.release()


def test_a_rollback_lasts_until_a_publish_and_a_deleted_version_can_be_published_anew(store: WeightStore) -> None:
    for version in (1, 2):
        store.publish(version, weights(version))
    store.rollback(1)
    assert store.latest() == 1 and store.get("latest", weights()) == 1 and value_in(store, 2) == 2
    store.publish(3, weights(3))
    assert store.latest() == 3
    store.delete(3)
    assert store.latest() == 2 and store.versions() == [2]
    store.publish(3, weights(33))
    assert value_in(store, 3) == 33
    for call in (store.rollback, store.delete):
        with pytest.raises(NoSuchVersion):
            call(9)


def test_a_version_is_visible_when_all_its_parts_are_there(store: WeightStore) -> None:
    store.publish(3, {"a": torch.ones(10)}, part=0, parts=2)
    assert store.versions() == [] and store.latest() is None
    with pytest.raises(NoSuchVersion, match="1 of 2 parts"):
        store.get(3, {"a": torch.zeros(10)})
    with pytest.raises(Mismatch, match="2 parts, this publisher says 3"):
        store.publish(3, {"b": torch.ones(10)}, part=1, parts=3)
    store.publish(3, {"b": torch.full((10,), 2.0)}, part=1, parts=2)
    into = {"b": torch.zeros(10), "a": torch.zeros(10)}
    assert store.get("latest", into) == 3
    assert into["a"].tolist() == [1.0] * 10 and into["b"].tolist() == [2.0] * 10


def test_wait_returns_a_version_that_is_published_meanwhile(store: WeightStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, 4, 10)
        eventually(waiting.running)
        store.publish(4, weights())
        store.publish(5, weights(2))
        assert waiting.result() in (4, 5)
    assert store.wait(2, timeout=1) == 5
    with pytest.raises(OpTimeout, match="the newest is 5"):
        store.wait(6, timeout=0.02)
    with pytest.raises(StoreTimeout, match="get of version 5"):
        store.get(5, weights(), timeout=0)


def test_a_closed_store_refuses_calls_and_one_without_references_is_closed(store: WeightStore, tmp_path: Path) -> None:
    store.publish(1, weights())
    store.close()
    store.close()
    for use in (lambda: store.publish(2, weights()), lambda: store.get(1, weights()), store.latest, store.versions):
        with pytest.raises(Mismatch, match="closed"):
            use()
    url = f"memory://{tmp_path}/forgotten"
    forgotten = WeightStore(url)
    forgotten.publish(1, weights())
    before = threading.active_count()
    del forgotten
    gc.collect()
    eventually(lambda: threading.active_count() < before)
    with WeightStore(url) as fresh:
        assert fresh.versions() == []


def pieces_of(tensors: dict[str, torch.Tensor]) -> tuple[CopyPiece, ...]:
    blocks = [PartBlock(name, tensor, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return pack(blocks, b"", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).manifest.layout.pieces


def test_the_layout_of_a_part_reads_tensors_in_few_pieces() -> None:
    pieces = pieces_of({f"layer{number}": torch.ones(64, 64) for number in range(300)})
    assert len(pieces) == 3
    assert sum(piece.nbytes for piece in pieces) == 300 * 64 * 64 * 4
    pieces = pieces_of({"a": torch.ones(3, 1 << 20), "b": torch.ones(5)})
    assert max(piece.nbytes for piece in pieces) == PIECE_BYTES
    assert sum(piece.nbytes for piece in pieces) == 12 * (1 << 20) + 20


# -- several processes


def test_a_holder_that_closes_hands_over_its_replicas(url: str, start: Start) -> None:
    with WeightStore(url, replicas=1) as store:
        store.publish(1, weights(6))
        holder = start(a_holder, url)
        assert holder.hear() == [1]
        store.close()
    with WeightStore(url, hold=False) as reader:
        assert [each.pid for each in reader.holders(1)] == [holder.pid]
        assert reader.latest() == 1 and value_in(reader, 1) == 6


def test_readers_never_see_a_mixture(url: str, holders: Holders, start: Start) -> None:
    """Each version is filled with its number, so every read must have one number in all elements."""

    def reader(pipe: Connection) -> None:
        into = {"small": torch.zeros(100), "large": torch.zeros(1 << 19), "last": torch.zeros(50)}
        seen = []
        with WeightStore(url, hold=False) as mine:
            mine.wait(0)
            while not seen or seen[-1] < 24:
                version = mine.get("latest", into)
                assert all(bool((tensor == version).all()) for tensor in into.values()), version
                if not seen:
                    pipe.send(version)
                seen.append(version)
        assert seen == sorted(seen)
        pipe.send(len(set(seen)))

    holders(1)
    readers = [start(reader) for _ in range(2)]
    with WeightStore(url) as store:
        for version in range(25):
            sizes = {"small": 100, "large": 1 << 19, "last": 50}
            store.publish(version, {name: torch.full((size,), float(version)) for name, size in sizes.items()})
            if version == 0:
                assert [child.hear() for child in readers] == [0, 0]
        for child in readers:
            assert child.hear() > 1
            child.end()


def test_an_idle_holder_costs_little(url: str, start: Start) -> None:
    def idler(pipe: Connection) -> None:
        with WeightStore(url):
            before = time.process_time()
            time.sleep(1.0)
            pipe.send(time.process_time() - before)

    assert start(idler).hear() < 0.05


def test_first_calls_take_fewer_page_faults(start: Start, url: str) -> None:
    def publish_and_get(pipe: Connection, warmed: bool) -> None:
        if not warmed:
            weight_store._publish_and_get = lambda plane: None
        state = {f"layers.{number}.weight": torch.ones(1024) for number in range(300)}
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        with WeightStore(f"{url}-{warmed}", replicas=1, expect=4 << 20) as store:
            eventually(lambda: len(store._replica_holder.pool._spare) == AHEAD)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            store.publish(1, state)
            store.get(1, into)
            pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    cold, warm = (start(publish_and_get, warmed) for warmed in (False, True))
    assert warm.hear() < 0.85 * cold.hear()
    for child in (cold, warm):
        child.end()


def test_what_fails_is_left_to_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_store, "_done", set())
    with memory("shm") as plane:
        monkeypatch.setattr(type(plane), "expose", Mock(side_effect=Unsupported("exposing memory", "")))
        weight_store.warm_up(plane)
        assert weight_store._done


# -- for asyncio: the same calls, and what is left of a cancelled one


NOT_FOR_USERS = {"reset_in_child", "open_catalog"}


@pytest.fixture
def no_complaint(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asyncio has nothing to complain of, such as an error that nobody asked for."""
    yield
    gc.collect()
    assert not [each for each in (*caplog.get_records("call"), *caplog.records) if each.name == "asyncio"]


without_complaint = pytest.mark.usefixtures("no_complaint")


def public(kind: type) -> dict[str, Any]:
    names = {name for name in vars(kind) if not name.startswith("_")} - NOT_FOR_USERS
    return {name: vars(kind)[name] for name in names}


@pytest.mark.parametrize(
    ("sync", "asynchronous"), [(WeightStore, AsyncWeightStore), (Follower, AsyncFollower), (Lease, AsyncLease)]
)
def test_both_have_the_same_calls_with_the_same_arguments(sync: type, asynchronous: type) -> None:
    ours, theirs = public(asynchronous), public(sync)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        if isinstance(method, property):
            assert isinstance(theirs[name], property)
            continue
        assert name == "batch" or (inspect.iscoroutinefunction(method) and inspect.unwrap(method) is theirs[name]), name
        assert inspect.signature(method).parameters == inspect.signature(theirs[name]).parameters, name
    if sync is WeightStore:
        assert inspect.signature(sync).parameters == inspect.signature(asynchronous).parameters


@without_complaint
async def test_versions_are_published_and_read(tmp_path: Path) -> None:
    async with AsyncWeightStore(f"memory://{tmp_path}") as store:
        waiting = asyncio.create_task(store.wait(1))
        await store.publish(1, weights(1))
        assert await waiting == 1
        into = weights(0)
        assert await store.get("latest", into, atomic=True) == 1 and float(into["a"][0]) == 1
        async with await store.pin(1) as lease:
            assert lease.version == 1
            with pytest.raises(Mismatch, match="pinned"):
                await store.delete(1)
        held, follower = await store.pin(1), await store.follow(weights(-1))
    await held.release()
    await follower.close()
    await store.close()
    for call in (store.latest(), follower.swap()):
        with pytest.raises(Mismatch, match="closed"):
            await call


@without_complaint
async def test_a_follower_is_a_series_of_versions(tmp_path: Path) -> None:
    told: list[tuple[int, bool]] = []

    def on_version(number: int) -> None:
        told.append((number, threading.current_thread() is threading.main_thread()))

    async with AsyncWeightStore(f"memory://{tmp_path}") as store:
        await store.publish(1, weights(1))
        into = weights(-1)
        async with await store.follow(into, on_version=on_version) as follower:
            async for version in follower:
                assert float(into["a"][0]) == version == follower.version
                if version == 3:
                    break
                await store.publish(version + 1, weights(version + 1))
            assert await follower.back() == 2
            async with follower.batch() as version:
                assert version == 2 and float(into["b"][0, 0]) == 2
            assert [number for number, _ in told] == [1, 2, 3, 2] and all(main for _, main in told)


@without_complaint
async def test_many_calls_that_wait_keep_no_other_from_working_and_end_when_cancelled(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    async with AsyncWeightStore(url) as store, await store.follow(weights(-1)) as follower:
        waits = [asyncio.create_task(store.wait(1)) for _ in range(50)]
        await asyncio.sleep(0.05)
        for call in (store.wait(5), follower.catch_up(), follower.next_version(), follower.wait_ready(3)):
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.05)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=5.0)
            assert done and task.cancelled()
        await store.publish(1, weights(1))
        assert set(await asyncio.gather(*waits)) == {1}


@without_complaint
async def test_a_cancelled_publish_is_withdrawn(url: str) -> None:
    """It asks for more replicas than there are processes, so it would wait for its whole timeout."""
    with WeightStore(url, replicas=1) as other:
        async with AsyncWeightStore(url, replicas=3) as store:
            task = asyncio.create_task(store.publish(1, weights(1)))
            while other._catalog_client.read()[1].version(1) is None:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert other._catalog_client.read()[1].version(1) is None
        other.publish(1, weights(2))


class Held:
    """Calls of a method that have done their work, and do not return before the task that waits is cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, again: bool = False) -> None:
        call = getattr(kind, name)

        def held(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            self._done.set()
            self._go_on.wait(20.0)
            return call(*args, **options) if again else found

        self._done, self._go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(kind, name, held)

    async def cancel(self, call: Awaitable[Any]) -> asyncio.CancelledError:
        self._done.clear(), self._go_on.clear()
        task = asyncio.ensure_future(call)
        while not self._done.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.sleep(0)
        self._go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return caught.value


@without_complaint
async def test_a_cancelled_get_is_atomic_or_says_what_it_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncWeightStore(f"memory://{tmp_path}") as store:
        await store.publish(1, weights(1))
        filling = Held(monkeypatch, VersionReader, "carry_out", again=True)
        into = weights(-1)
        await filling.cancel(store.get(1, into, atomic=True))
        assert value_of(into) == -1
        cause = (await filling.cancel(store.get(1, into))).__cause__
        assert isinstance(cause, CallCancelled) and set(cause.mixed) == {"a", "b"}


@without_complaint
async def test_what_a_cancelled_call_got_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin and a follower that were there when the task was cancelled."""
    pins, follows = (Held(monkeypatch, WeightStore, name) for name in ("pin", "follow"))
    with WeightStore(f"memory://{tmp_path}") as other:
        async with AsyncWeightStore(f"memory://{tmp_path}") as store:
            await store.publish(1, weights(1))
            for held, call in ((pins, store.pin(1)), (follows, store.follow(weights(-1)))):
                await held.cancel(call)
                catalog = other._catalog_client.read()[1]
                assert catalog.pins == () and catalog.readers == ()


@without_complaint
async def test_bad_arguments_are_refused_when_the_store_opens() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        async with AsyncWeightStore(keep=0):
            pass
    store = AsyncWeightStore("nonsense")
    with pytest.raises(ValueError, match="register"):
        await store.latest()
    await store.close()
