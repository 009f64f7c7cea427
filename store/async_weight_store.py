"""`AsyncWeightStore`: the weight store for asyncio. Its calls are those of `WeightStore`, as coroutines.

Each is made from the call of the same name, and has its arguments, types and documentation: the classes at the end are
the tables of them.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.quantities import seconds_or
from holdfast.store.catalog.client import Cancellation
from holdfast.store.errors import CallCancelled
from holdfast.store.follow.follower import Follower
from holdfast.store.read.device_copies import DeviceReadCounts
from holdfast.store.weight_store import Lease, WeightStore

P = ParamSpec("P")
T = TypeVar("T")
Sync = TypeVar("Sync")
_NO_ERROR = None, None, None

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


# Coroutines of calls --------------------------------------------------------------------------------------------------


def like(call: Callable[Concatenate[Any, P], Any]) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method the arguments, their types and the documentation of a synchronous one. A decorator."""
    return lambda method: update_wrapper(method, call)


def coroutine(
    call: Callable[Concatenate[Any, P], T], *, timed: bool = False, waits: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The coroutine of a call. The time that a `timed` one waits for a thread counts towards its `timeout`.

    One that `waits` for other processes or tasks does not keep the others from working.
    """

    @like(call)
    async def method(self: _Asynchronous[Any], *args: Any, **keywords: Any) -> T:
        result: T = await self._run(call, args, keywords, timed=timed, waits=waits)
        return result

    return method


class _Asynchronous(ABC, Generic[Sync]):
    """An object with calls that run in threads."""

    _calls: AsyncCalls
    _timeout: float

    @abstractmethod
    async def _synchronous(self) -> Sync:
        """The object that they are calls of."""

    async def _run(
        self,
        call: Callable[..., T],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        timed: bool = False,
        waits: bool = False,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        bound = inspect.signature(call).bind(await self._synchronous(), *args, **keywords)
        deadline = time.monotonic() + seconds_or(bound.arguments.get("timeout") if timed else None, self._timeout)

        def body() -> T:
            if timed:
                bound.arguments["timeout"] = max(deadline - time.monotonic(), 0.0)
            return call(*bound.args, **bound.kwargs)

        return await self._calls.run(call.__name__, body, waits=waits, undo=undo)


class AsyncLease:
    """A version that stays until `release`, or until its store closes or this process ends."""

    def __init__(self, lease: Lease, calls: AsyncCalls) -> None:
        self.version = lease.version
        self._lease, self._calls = lease, calls

    @like(Lease.release)
    async def release(self) -> None:
        if not self._calls.closed:
            await self._calls.run("release", self._lease.release)

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncFollower(_Asynchronous[Follower]):
    """A `Follower` for asyncio; `async for` gives each new version, once it is in the reader's tensors.

    A cancelled call leaves the tensors with the version before, or with the next one: `version` says which.
    `on_version` is called in the event loop.
    """

    def __init__(
        self, follower: Follower, calls: AsyncCalls, on_version: Callable[[int], object] | None, timeout: float
    ) -> None:
        self._follower, self._calls, self._on_version, self._timeout = follower, calls, on_version, timeout
        self._reported: int | None = None

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

    @property
    def failure(self) -> HoldfastError | None:
        """The error that the background tries to overcome; None if it goes on without one."""
        return self._follower.failure

    @property
    def changed(self) -> threading.Condition:
        """See `Follower.changed`: for threads."""
        return self._follower.changed

    is_due = coroutine(Follower.is_due)
    is_current = coroutine(Follower.is_current)
    ready = coroutine(Follower.ready)
    wait_ready = coroutine(Follower.wait_ready, timed=True, waits=True)
    swap = coroutine(Follower.swap)
    catch_up = coroutine(Follower.catch_up, timed=True, waits=True)
    next_version = coroutine(Follower.next_version, timed=True, waits=True)
    back = coroutine(Follower.back, timed=True, waits=True)

    @asynccontextmanager
    async def batch(self, timeout: float | None = None) -> AsyncIterator[int]:
        """Serve a batch: no swap happens inside. See `Follower.batch`."""

        def enter(follower: Follower, timeout: float | None) -> tuple[Any, int]:
            batch = follower.batch(timeout)
            return batch, batch.__enter__()

        batch, version = await self._run(
            enter,
            (),
            {"timeout": timeout},
            timed=True,
            waits=True,
            undo=lambda entered: entered[0].__exit__(*_NO_ERROR),
        )
        try:
            yield version
        finally:
            batch.__exit__(*_NO_ERROR)

    @like(Follower.close)
    async def close(self) -> None:
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

    async def _synchronous(self) -> Follower:
        return self._follower

    async def _run(self, *args: Any, **keywords: Any) -> Any:
        result = await super()._run(*args, **keywords)
        self._report()
        return result

    def _report(self) -> None:
        if self.version is not None and self.version != self._reported:
            self._reported = self.version
            if self._on_version is not None:
                self._on_version(self.version)


class AsyncWeightStore(_Asynchronous[WeightStore]):
    """A `WeightStore` for asyncio: the same arguments, and the same calls as coroutines.

    The calls run in a bounded number of threads. `async with` opens the store, as does the first call. A call that is
    cancelled has ended when `CancelledError` is raised: a publish is withdrawn, unless it had its replicas already; a
    get with `atomic` has changed nothing, and without it the error's cause says in `mixed` what holds a mixture; a
    switch is aborted, unless it was committed already; of other calls nothing is left. The calls of the inspector that
    `inspect` gives are no coroutines. Not for use in several event loops.
    """

    @like(WeightStore.__init__)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        bound = inspect.signature(WeightStore).bind(*args, **keywords)
        bound.apply_defaults()
        self._timeout = bound.arguments["timeout"]
        self._make = partial(WeightStore, *args, **keywords)
        self._calls = AsyncCalls()
        self._opening = asyncio.Lock()
        self._store: WeightStore | None = None

    publish = coroutine(WeightStore.publish, timed=True)
    get = coroutine(WeightStore.get, timed=True)
    load = coroutine(WeightStore.load, timed=True)
    latest = coroutine(WeightStore.latest)
    versions = coroutine(WeightStore.versions)
    digests = coroutine(WeightStore.digests)
    holders = coroutine(WeightStore.holders)
    wait = coroutine(WeightStore.wait, timed=True, waits=True)
    rollback = coroutine(WeightStore.rollback)
    delete = coroutine(WeightStore.delete)
    inspect = coroutine(WeightStore.inspect)
    switch = coroutine(WeightStore.switch, timed=True, waits=True)
    readers = coroutine(WeightStore.readers)

    @property
    def device_reads(self) -> DeviceReadCounts:
        """See `WeightStore.device_reads`."""
        return DeviceReadCounts() if self._store is None else self._store.device_reads

    @like(WeightStore.pin)
    async def pin(self, *args: Any) -> AsyncLease:
        return AsyncLease(await self._run(WeightStore.pin, args, {}, undo=Lease.release), self._calls)

    @like(WeightStore.follow)
    async def follow(self, *args: Any, **keywords: Any) -> AsyncFollower:
        on_version, timeout = keywords.pop("on_version", None), keywords.get("timeout")
        follower = await self._run(WeightStore.follow, args, keywords, undo=Follower.close)
        return AsyncFollower(follower, self._calls, on_version, seconds_or(timeout, self._timeout))

    @like(WeightStore.close)
    async def close(self) -> None:
        async with self._opening:
            if self._store is not None and not self._calls.closed:
                await self._calls.run("close", self._store.close)
            self._calls.close()

    async def __aenter__(self) -> AsyncWeightStore:
        try:
            await self._synchronous()
        except BaseException:
            self._calls.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _synchronous(self) -> WeightStore:
        async with self._opening:
            if self._store is None:
                self._store = await self._calls.run("open", self._make, undo=WeightStore.close)
            return self._store
