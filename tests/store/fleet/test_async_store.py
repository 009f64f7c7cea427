"""The weight store for asyncio: the same calls, and what is left of a cancelled one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.comms.errors import Mismatch
from holdfast.store import AsyncFollower, AsyncLease, AsyncWeightStore, CallCancelled, Follower, Lease, WeightStore
from holdfast.store.read.version_reader import VersionReader
from support.waiting import eventually
from support.weights.state_dicts import value_of, weights

NOT_FOR_USERS = {"reset_in_child", "open_catalog"}


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Run a test's body; asyncio must have nothing to complain of, and no thread be left."""
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        await asyncio.wait_for(body(), 60.0)
        gc.collect()

    before = set(threading.enumerate())
    asyncio.run(main())
    assert not complaints
    eventually(lambda: not {each for each in threading.enumerate() if each.name.startswith("holdfast")} - before)


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
        assert inspect.iscoroutinefunction(method) or name == "batch", name
        assert inspect.signature(method).parameters == inspect.signature(theirs[name]).parameters, name
    if sync is WeightStore:
        assert inspect.signature(sync).parameters == inspect.signature(asynchronous).parameters


def test_versions_are_published_and_read(tmp_path: Path) -> None:
    async def body() -> None:
        async with AsyncWeightStore(f"memory://{tmp_path}") as store:
            waiting = asyncio.create_task(store.wait(1))
            await store.publish(1, weights(1))
            assert await waiting == 1
            into = weights(0)
            assert await store.get("latest", into, atomic=True) == 1 and float(into["a"][0]) == 1
            assert float((await store.load(1, ["b"]))["b"][0, 0]) == 1
            async with await store.pin(1) as lease:
                assert lease.version == 1
                with pytest.raises(Mismatch, match="pinned"):
                    await store.delete(1)
            await store.publish(2, weights(2))
            await store.rollback(1)
            assert await store.latest() == 1 and await store.versions() == [1, 2]
            assert len(await store.holders()) == 1
            await store.delete(2)
            held, follower = await store.pin(1), await store.follow(weights(-1))
        await held.release()
        await follower.close()
        await store.close()
        for call in (store.latest(), follower.swap()):
            with pytest.raises(Mismatch, match="closed"):
                await call

    run(body)


def test_a_follower_is_a_series_of_versions(tmp_path: Path) -> None:
    async def body() -> None:
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

    run(body)


def test_many_calls_that_wait_keep_no_other_from_working_and_end_at_once_when_they_are_cancelled(
    tmp_path: Path,
) -> None:
    async def body() -> None:
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

    run(body)


def test_a_cancelled_publish_is_withdrawn(url: str) -> None:
    """It asks for more replicas than there are processes, so it would wait for its whole timeout."""

    async def body() -> None:
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

    run(body)


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
        """Cancel a call that is held."""
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


def test_a_cancelled_get_changes_nothing_or_says_what_it_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with AsyncWeightStore(f"memory://{tmp_path}") as store:
            await store.publish(1, weights(1))
            filling = Held(monkeypatch, VersionReader, "carry_out", again=True)
            into = weights(-1)
            await filling.cancel(store.get(1, into, atomic=True))
            assert value_of(into) == -1
            cause = (await filling.cancel(store.get(1, into))).__cause__
            assert isinstance(cause, CallCancelled) and set(cause.mixed) == {"a", "b"}

    run(body)


def test_what_a_cancelled_call_got_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin and a follower that were there when the task was cancelled."""
    pins, follows = (Held(monkeypatch, WeightStore, name) for name in ("pin", "follow"))

    async def body() -> None:
        with WeightStore(f"memory://{tmp_path}") as other:
            async with AsyncWeightStore(f"memory://{tmp_path}") as store:
                await store.publish(1, weights(1))
                for held, call in ((pins, store.pin(1)), (follows, store.follow(weights(-1)))):
                    await held.cancel(call)
                    catalog = other._catalog_client.read()[1]
                    assert catalog.pins == () and catalog.readers == ()

    run(body)


def test_bad_arguments_are_refused_when_the_store_opens() -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="at least 1"):
            async with AsyncWeightStore(keep=0):
                pass
        store = AsyncWeightStore("nonsense")
        with pytest.raises(ValueError, match="register"):
            await store.latest()
        await store.close()

    run(body)
