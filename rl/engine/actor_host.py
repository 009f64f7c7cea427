"""Runs an actor: async methods in an event loop, sync methods one at a time in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable
from typing import Any

from holdfast.ft.control.loop import LoopThread
from holdfast.ft.processes.packed_errors import pack_error
from holdfast.ft.processes.remote_calls import CallResult, MethodCall, ObjectRecipe, pack, unpack

Answer = Callable[[bytes], object]


class ActorHost:
    """Makes the actor in its thread of sync methods. Never raises: every failure is an answer."""

    def __init__(self) -> None:
        self._loop = LoopThread("actor-loop")
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "actor")
        self._actor: Any = None

    def make(self, recipe: bytes, answer: Answer) -> None:
        """Make the actor from a packed `ObjectRecipe`; the answer has no value."""

        def do() -> None:
            found: ObjectRecipe = unpack(recipe)
            self._actor = found.make()

        self._in_thread(do, answer)

    def call(self, request: bytes | bytearray | memoryview, answer: Answer) -> None:
        """Do a packed `MethodCall`; the answer is a packed `CallResult`."""
        try:
            call: MethodCall = unpack(request)
            method = getattr(self._actor, call.method)
        except BaseException as error:
            answer(pack(CallResult(error=pack_error(error))))
            return
        if inspect.iscoroutinefunction(method):
            work = _answer_async(method, call, answer)
            asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        else:
            self._in_thread(lambda: method(*call.args, **(call.kwargs or {})), answer)

    def _in_thread(self, do: Callable[[], Any], answer: Answer) -> None:
        self._thread.submit(_answer_sync, do, answer)


def _answer_sync(do: Callable[[], Any], answer: Answer) -> None:
    try:
        found = CallResult(do())
    except BaseException as error:
        found = CallResult(error=pack_error(error))
    answer(pack(found))


async def _answer_async(method: Callable[..., Any], call: MethodCall, answer: Answer) -> None:
    try:
        found = CallResult(await method(*call.args, **(call.kwargs or {})))
    except BaseException as error:
        found = CallResult(error=pack_error(error))
    answer(pack(found))
