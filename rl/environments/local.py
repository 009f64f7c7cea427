"""Environments in this process, each in a thread of its own, behind the same interface as remote ones."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.comms.errors import describe
from holdfast.rl.environments.environment import Action, Environment, Observation, State
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.errors import EnvironmentDied, EnvironmentFailed
from holdfast.rl.telemetry import WorkLog

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

    async def wait_ended(self, timeout: float) -> None:
        """Wait until the thread has ended, `timeout` seconds at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout)

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


CLOSE_SECONDS = 1.0
"""How long `close` waits for an environment; one that takes longer is left behind, with its thread."""


class LocalSession(EnvironmentSession):
    """An environment of this process, in a thread of its own. The environment is made at the first call."""

    def __init__(
        self,
        factory: Callable[[], Environment],
        environment: str,
        *,
        timeout: float = 30.0,
        on_end: Callable[[], None] | None = None,
        work: WorkLog | None = None,
    ) -> None:
        super().__init__(environment, timeout)
        self._work = work
        self._factory = factory
        self._made: Environment | None = None
        self._thread = CallThread(environment, on_end)
        self._episode: str | None = None
        self._steps = 0

    @property
    def at_work(self) -> bool:
        """Whether a call is running: if the session is closed, one that does not return."""
        return self._thread.at_work

    def name_episode(self, episode_id: str | None) -> None:
        """Give the next episode a name, which `state` returns."""
        self._episode = episode_id

    async def _reset(self, seed: int) -> Observation:
        self._steps = 0
        return await self._in_thread("reset", lambda: self._environment().reset(seed))

    async def _step(self, action: Action) -> Observation:
        self._steps += 1
        return await self._in_thread("step", lambda: self._environment().step(action))

    async def _state(self) -> State:
        fields = await self._in_thread("state", lambda: dict(self._environment().state()))
        return State(episode_id=self._episode, step_count=self._steps, fields=fields)

    def _abandon(self, error: BaseException) -> None:
        """Nothing can end a call of a thread."""

    async def _close(self, failed: bool) -> None:
        def close() -> None:
            with contextlib.suppress(BaseException):  # its last episode is over
                if self._made is not None:
                    self._made.close()

        self._thread.end(close)
        if not (failed and self._thread.at_work):
            await self._thread.wait_ended(CLOSE_SECONDS)

    def _environment(self) -> Environment:
        if self._made is None:
            self._made = self._factory()
        return self._made

    async def _in_thread(self, call: str, body: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                with contextlib.nullcontext() if self._work is None else self._work.calling(call):
                    return body()
            except EnvironmentFailed:
                raise
            except BaseException as error:  # SystemExit, too, is a failure of the environment
                raise EnvironmentDied(self.environment, call, f"it raised {describe(error)}") from error

        return await self._thread.run(guarded)
