"""`AsyncWeightStore`: the weight store for asyncio. Its calls are those of `WeightStore`, as coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from holdfast.comms.errors import Mismatch
from holdfast.comms.quantities import seconds_or
from holdfast.store.cancellation import Cancellation
from holdfast.store.casts.wire_cast import CastName
from holdfast.store.catalog.fleet_records import Reader
from holdfast.store.catalog.fleet_targets import Digests
from holdfast.store.catalog.records import Holder, Spread
from holdfast.store.errors import CallCancelled
from holdfast.store.follow.follower import Follower
from holdfast.store.follow.switch import SwitchResult
from holdfast.store.holding.replica_holder import Observe
from holdfast.store.inspection.inspector import StoreInspector
from holdfast.store.lease import Lease
from holdfast.store.read.slices import Slice
from holdfast.store.sharding.name_map import Layout
from holdfast.store.weight_store import HasUrl, WeightStore

T = TypeVar("T")


CALLS = 8
"""The most threads for calls that work."""
WAITS = 32
"""The most threads for calls that wait for other processes or tasks; these must not keep the others from working."""


class AsyncCalls:
    """Two bounded pools of threads, which are started as they are needed."""

    def __init__(self) -> None:
        self.closed = False
        self._calls = ThreadPoolExecutor(CALLS, "holdfast-store-call")
        self._waits = ThreadPoolExecutor(WAITS, "holdfast-store-wait")

    async def run(
        self, op: str, call: Callable[[], T], *, waits: bool = False, undo: Callable[[T], object] | None = None
    ) -> T:
        """Run a call in a thread. If this task is cancelled, end the call, then raise `CancelledError`.

        The error that the call then ended with, if it says more than that, is the cause. `undo` is called with the
        result of a call that could not be ended. Raises `Mismatch` after `close`.
        """
        if self.closed:
            raise Mismatch(f"{op} of a store that is closed; open another")
        cancellation = Cancellation(op)

        def body() -> T:
            with cancellation.scope():
                return call()

        running = (self._waits if waits else self._calls).submit(body)
        result_of = asyncio.wrap_future(running)
        # A cancelled shield no longer asks for it, and asyncio would report an error that was never retrieved.
        result_of.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(result_of)
        except asyncio.CancelledError:
            cancellation.cancel()
            if running.cancel():
                raise
            await self._ended(running)
            error = running.exception()
            if error is None and undo is not None:
                result = running.result()
                await self._ended(self._calls.submit(lambda: undo(result)))
            if error is None or (isinstance(error, CallCancelled) and not error.mixed):
                raise
            raise asyncio.CancelledError(str(error)) from error

    async def _ended(self, running: Future[T]) -> None:
        """Wait for a thread, whatever is cancelled; a cancelled call ends soon."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    def close(self) -> None:
        """End the threads, once the calls that run have ended. Idempotent."""
        self.closed = True
        self._calls.shutdown()
        self._waits.shutdown()


class AsyncLease:
    """A version that stays until `release`, or until its store closes or this process ends."""

    def __init__(self, lease: Lease, calls: AsyncCalls) -> None:
        self.version = lease.version
        self._lease, self._calls = lease, calls

    async def release(self) -> None:
        """End the lease. Idempotent. If the register cannot be reached, raises `RegisterAway`; the version stays."""
        if not self._calls.closed:
            await self._calls.run("release", self._lease.release)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncFollower:
    """A `Follower` for asyncio; `async for` gives each new version, once it is in the reader's tensors.

    A cancelled call leaves the tensors with the version before, or with the next one: `version` says which.
    """

    def __init__(
        self, follower: Follower, calls: AsyncCalls, on_version: Callable[[int], object] | None, timeout: float
    ) -> None:
        self._follower, self._calls, self._on_version, self._timeout = follower, calls, on_version, timeout
        self._told: int | None = None

    @property
    def reader(self) -> str:
        """The reader's name; one made up for a reader without."""
        return self._follower.reader

    @property
    def version(self) -> int | None:
        """The version in the reader's tensors; None before the first, and if a swap was broken off in the middle."""
        return self._follower.version

    @property
    def failures(self) -> int:
        """The number of errors of the background so far."""
        return self._follower.failures

    async def ready(self, version: int) -> bool:
        """See `Follower.ready`."""
        return self._follower.ready(version)

    async def wait_ready(self, version: int, timeout: float | None = None) -> None:
        """See `Follower.wait_ready`."""
        await self._timed("wait_ready", partial(self._follower.wait_ready, version), timeout)

    async def swap(self) -> int:
        """See `Follower.swap`; `on_version` is called in the event loop."""
        return self._tell(await self._calls.run("swap", self._follower.swap))

    async def catch_up(self, timeout: float | None = None) -> int:
        """See `Follower.catch_up`."""
        return self._tell(await self._timed("catch_up", self._follower.catch_up, timeout))

    async def next_version(self, timeout: float | None = None) -> int:
        """See `Follower.next_version`."""
        return self._tell(await self._timed("next_version", self._follower.next_version, timeout))

    async def back(self, timeout: float | None = None) -> int:
        """See `Follower.back`."""
        return self._tell(await self._timed("back", self._follower.back, timeout))

    @asynccontextmanager
    async def batch(self, timeout: float | None = None) -> AsyncIterator[int]:
        """Serve a batch: no swap happens inside. See `Follower.batch`."""

        def enter(left: float) -> tuple[Any, int]:
            batch = self._follower.batch(left)
            return batch, batch.__enter__()

        batch, version = await self._timed("batch", enter, timeout, lambda found: found[0].__exit__(None, None, None))
        try:
            yield self._tell(version)
        finally:
            batch.__exit__(None, None, None)

    async def close(self) -> None:
        """End the background, and let all versions go; the tensors keep their bytes. Idempotent."""
        if not self._calls.closed:
            await self._calls.run("close", self._follower.close)

    async def __aenter__(self) -> AsyncFollower:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncFollower:
        return self

    async def __anext__(self) -> int:
        return await self.next_version()

    async def _timed(
        self,
        op: str,
        call: Callable[[float], T],
        timeout: float | None,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        deadline = time.monotonic() + seconds_or(timeout, self._timeout)
        return await self._calls.run(op, lambda: call(_left(deadline)), waits=True, undo=undo)

    def _tell(self, version: int) -> int:
        if self._told != version:
            self._told = version
            if self._on_version is not None:
                self._on_version(version)
        return version


class AsyncWeightStore:
    """A `WeightStore` for asyncio: the same arguments, and the same calls as coroutines.

    The calls run in a bounded number of threads. `async with` opens the store, as does the first call. A call that is
    cancelled has ended when `CancelledError` is raised: a publish is withdrawn, unless it had its replicas already; a
    get with `atomic` has changed nothing, and without it the error's cause says in `mixed` what holds a mixture; of
    other calls nothing is left. Not for use in several event loops.
    """

    def __init__(
        self,
        url: str | HasUrl = "memory://",
        *,
        name: str = "default",
        replicas: int | None = None,
        spread: Spread = "auto",
        hold: bool = True,
        keep: int = 2,
        plane: str = "auto",
        timeout: float = 30.0,
        limit: int | None = None,
        expect: int = 0,
        reserve: int = 0,
        observe: Observe | None = None,
    ) -> None:
        self._timeout = timeout
        self._make = partial(
            WeightStore,
            url,
            name=name,
            replicas=replicas,
            spread=spread,
            hold=hold,
            keep=keep,
            plane=plane,
            timeout=timeout,
            limit=limit,
            expect=expect,
            reserve=reserve,
            observe=observe,
        )
        self._calls = AsyncCalls()
        self._opening = asyncio.Lock()
        self._store: WeightStore | None = None

    async def publish(
        self,
        version: int,
        state_dict: Mapping[str, Any],
        *,
        part: int | None = None,
        parts: int | None = None,
        fence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """See `WeightStore.publish`."""
        store = await self._opened()
        call = partial(store.publish, version, state_dict, part=part, parts=parts, fence=fence)
        await self._timed("publish", lambda left: call(timeout=left), timeout)

    async def get(
        self,
        version: int | Literal["latest"],
        into: Mapping[str, Any],
        *,
        timeout: float | None = None,
        strict: bool = True,
        atomic: bool = False,
        layout: Layout | None = None,
        cast: CastName | None = None,
    ) -> int:
        """See `WeightStore.get`."""
        store = await self._opened()
        call = partial(store.get, version, into, strict=strict, atomic=atomic, layout=layout, cast=cast)
        return await self._timed("get", lambda left: call(timeout=left), timeout)

    async def load(
        self,
        version: int | Literal["latest"] = "latest",
        names: str | Iterable[str] | Mapping[str, Slice] | None = None,
        *,
        map: bool = False,  # noqa: A002
        timeout: float | None = None,
        cast: CastName | None = None,
    ) -> dict[str, Any]:
        """See `WeightStore.load`."""
        store = await self._opened()
        call = partial(store.load, version, names, map=map, cast=cast)
        return await self._timed("load", lambda left: call(timeout=left), timeout)

    async def latest(self) -> int | None:
        """See `WeightStore.latest`."""
        return await self._run("latest", lambda store: store.latest())

    async def versions(self) -> list[int]:
        """See `WeightStore.versions`."""
        return await self._run("versions", lambda store: store.versions())

    async def digests(self, version: int) -> Digests:
        """See `WeightStore.digests`."""
        return await self._run("digests", lambda store: store.digests(version))

    async def holders(self, version: int | Literal["latest"] = "latest") -> tuple[Holder, ...]:
        """See `WeightStore.holders`."""
        return await self._run("holders", lambda store: store.holders(version))

    async def wait(self, version: int, timeout: float | None = None) -> int:
        """See `WeightStore.wait`."""
        store = await self._opened()
        return await self._timed("wait", lambda left: store.wait(version, left), timeout, waits=True)

    async def pin(self, version: int | Literal["latest"]) -> AsyncLease:
        """See `WeightStore.pin`."""
        store = await self._opened()
        lease = await self._calls.run("pin", lambda: store.pin(version), undo=Lease.release)
        return AsyncLease(lease, self._calls)

    async def rollback(self, version: int) -> None:
        """See `WeightStore.rollback`."""
        await self._run("rollback", lambda store: store.rollback(version))

    async def delete(self, version: int) -> None:
        """See `WeightStore.delete`."""
        await self._run("delete", lambda store: store.delete(version))

    async def inspect(self, timeout: float | None = None) -> StoreInspector:
        """See `WeightStore.inspect`. The inspector's own calls are not coroutines."""
        return await self._run("inspect", lambda store: store.inspect(timeout))

    async def follow(
        self,
        into: Mapping[str, Any],
        *,
        on_version: Callable[[int], object] | None = None,
        reader: str | None = None,
        strict: bool = True,
        layout: Layout | None = None,
        cast: CastName | None = None,
        timeout: float | None = None,
    ) -> AsyncFollower:
        """See `WeightStore.follow`; `on_version` is called in the event loop."""
        store = await self._opened()
        call = partial(store.follow, into, reader=reader, strict=strict, layout=layout, cast=cast, timeout=timeout)
        follower = await self._calls.run("follow", call, undo=Follower.close)
        return AsyncFollower(follower, self._calls, on_version, seconds_or(timeout, self._timeout))

    async def switch(
        self,
        version: int,
        readers: Sequence[str] | None = None,
        quorum: int | None = None,
        *,
        timeout: float | None = None,
    ) -> SwitchResult:
        """See `WeightStore.switch`. A cancelled one is aborted, unless it was committed already."""
        store = await self._opened()
        call = partial(store.switch, version, readers, quorum)
        return await self._timed("switch", lambda left: call(timeout=left), timeout, waits=True)

    async def readers(self) -> tuple[Reader, ...]:
        """See `WeightStore.readers`."""
        return await self._run("readers", lambda store: store.readers())

    async def close(self) -> None:
        """See `WeightStore.close`. Idempotent."""
        async with self._opening:
            if self._store is not None and not self._calls.closed:
                await self._calls.run("close", self._store.close)
            self._calls.close()

    async def __aenter__(self) -> AsyncWeightStore:
        try:
            await self._opened()
        except BaseException:
            self._calls.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _opened(self) -> WeightStore:
        async with self._opening:
            if self._store is None:
                self._store = await self._calls.run("open", self._make, undo=WeightStore.close)
            return self._store

    async def _run(self, op: str, call: Callable[[WeightStore], T]) -> T:
        store = await self._opened()
        return await self._calls.run(op, lambda: call(store))

    async def _timed(self, op: str, call: Callable[[float], T], timeout: float | None, *, waits: bool = False) -> T:
        """Run a call with what is left of its time when a thread is free."""
        deadline = time.monotonic() + seconds_or(timeout, self._timeout)
        return await self._calls.run(op, lambda: call(_left(deadline)), waits=waits)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
