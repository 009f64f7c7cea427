"""Runs calls of the store in threads for asyncio. A cancelled call has ended when its task goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from holdfast.comms.errors import Mismatch
from holdfast.store.cancellation import Cancellation
from holdfast.store.errors import CallCancelled

CALLS = 8
"""The most threads for calls that work."""
WAITS = 32
"""The most threads for calls that wait for other processes or tasks; these must not keep the others from working."""

T = TypeVar("T")


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
