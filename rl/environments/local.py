"""Environments in this process, behind the same interface as remote ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from holdfast.comms.errors import describe
from holdfast.rl.environments.call_thread import CallThread
from holdfast.rl.environments.environment import Action, Environment, Observation, State
from holdfast.rl.environments.errors import EnvironmentBusy, EnvironmentDied, EnvironmentFailed
from holdfast.rl.environments.session import EnvironmentSession
from holdfast.rl.environments.session_source import SessionSource
from holdfast.rl.telemetry import WorkLog

T = TypeVar("T")

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


class LocalPool(SessionSource):
    """Sessions of an environment of this process, at most `limit` at a time; further ones wait up to `wait` seconds.

    An environment that hangs keeps its place until its call returns: only a process can be killed.
    """

    attempts = 1

    def __init__(
        self,
        factory: Callable[[], Environment],
        environment: str,
        *,
        limit: int = 64,
        timeout: float = 30.0,
        wait: float = 60.0,
    ) -> None:
        super().__init__(environment, timeout=timeout, wait=wait)
        self.limit, self._factory = limit, factory
        self._places = asyncio.Semaphore(limit)

    async def lease(self) -> EnvironmentSession:
        try:
            async with asyncio.timeout(self.wait):
                await self._places.acquire()
        except TimeoutError as error:
            why = f"no place of {self.limit} was free for {self.wait:.3g} s"
            raise EnvironmentBusy(self.environment, "reset", why) from error
        return LocalSession(self._factory, self.environment, timeout=self.timeout, on_end=self._places.release)
