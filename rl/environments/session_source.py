"""`SessionSource`: where sessions come from, in this process or from servers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from holdfast.rl.environments.environment import Action, Observation, State
from holdfast.rl.environments.errors import EnvironmentFailed
from holdfast.rl.environments.session import EnvironmentSession


class SessionSource(ABC):
    """Leases sessions of one kind of environment, and frees each of them in any case.

    A call of an environment may take `timeout` seconds; a reset, which may have to wait for a place, `wait` more.
    """

    attempts: ClassVar[int]
    """How many environments a reset tries: an episode that has not begun can begin elsewhere."""

    def __init__(self, environment: str, *, timeout: float, wait: float) -> None:
        self.environment, self.timeout, self.wait = environment, timeout, wait
        self._closing: set[asyncio.Task[None]] = set()

    def session(self) -> LeasedSession:
        """A session, to be used as `async with`. It takes a place at its first reset."""
        return LeasedSession(self)

    @abstractmethod
    async def lease(self) -> EnvironmentSession:
        """A fresh session in a place that it takes. Raises EnvironmentFailed."""

    async def give_back(self, session: EnvironmentSession) -> None:
        """Free a leased session that has not failed."""
        await session.close()

    def release(self, session: EnvironmentSession) -> None:
        """Free a leased session; does not wait."""
        task = asyncio.ensure_future(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until all released sessions are closed. Sessions that are still in use go on."""
        while self._closing:
            await asyncio.wait(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class LeasedSession(EnvironmentSession):
    """A session of a source. After a failure, reset it: the next episode is played by another environment."""

    renewable = True

    def __init__(self, source: SessionSource) -> None:
        super().__init__(source.environment, source.timeout)
        self._source = source
        self._leased: EnvironmentSession | None = None

    async def _reset(self, seed: int) -> Observation:
        for attempt in range(1, self._source.attempts + 1):
            try:
                if self._leased is None:
                    self._leased = await self._source.lease()
                return await self._leased.reset(seed)
            except EnvironmentFailed as error:
                self._abandon(error)
                if attempt == self._source.attempts:
                    raise
        raise AssertionError("unreachable")

    async def _step(self, action: Action) -> Observation:
        assert self._leased is not None, "a running episode has an environment"
        return await self._leased.step(action)

    async def _state(self) -> State:
        return await self._leased.state() if self._leased is not None else State()

    def _limit(self, call: str) -> float:
        # The leased session and the lease have limits of their own, and better messages: these come first.
        return self._timeout + 1.0 + self._source.wait * (call == "reset")

    def _abandon(self, error: BaseException) -> None:
        leased, self._leased = self._leased, None
        if leased is not None:
            self._source.release(leased)

    async def _close(self, failed: bool) -> None:
        leased, self._leased = self._leased, None
        if leased is not None:
            await (leased.close() if failed else self._source.give_back(leased))
