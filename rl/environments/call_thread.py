"""`CallThread`: runs the calls of one environment, which may block for ever, beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class CallThread:
    """A daemon thread for one call after another, made and used within one event loop.

    A call that its caller has given up goes on until it returns: nothing can end it. `on_end` is called in the event
    loop once the thread has ended.
    """

    def __init__(self, name: str, on_end: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any] | None]] = queue.SimpleQueue()
        self._on_end = on_end
        self._ended = asyncio.Event()
        self._at_work = False
        threading.Thread(target=self._run, name=f"holdfast-environment {name}", daemon=True).start()

    @property
    def at_work(self) -> bool:
        """Whether a call is running."""
        return self._at_work

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a call; raises what it raises."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return await future

    def end(self, last: Callable[[], None]) -> None:
        """Let the thread end after the calls that it has and a last one; does not wait."""
        self._calls.put((last, None))

    async def wait_ended(self, timeout: float) -> bool:
        """Whether the thread has ended, after `timeout` seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout)
        return self._ended.is_set()

    def _run(self) -> None:
        future: asyncio.Future[Any] | None
        while True:
            call, future = self._calls.get()
            self._at_work = True
            result, error = None, None
            try:
                if future is None or not future.cancelled():
                    result = call()
            except BaseException as raised:
                error = raised
            self._at_work = False
            if future is None:
                return self._in_loop(self._tell_end)
            self._in_loop(_settle, future, result, error)
            del call, future, result, error  # while this thread waits, it keeps nothing alive

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
            self._loop.call_soon_threadsafe(function, *arguments)

    def _tell_end(self) -> None:
        self._ended.set()
        if self._on_end is not None:
            self._on_end()


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # given up
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
