"""Sessions: one environment as the loop drives it, with a deadline for every call."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Literal, Self, TypeVar

from holdfast.rl.environments.environment import Action, Observation, State, checked
from holdfast.rl.errors import EnvironmentFailed, EnvironmentHung, EnvironmentRefused, EpisodeOver

T = TypeVar("T")
Phase = Literal["new", "running", "over", "failed", "closed"]


class EnvironmentSession(ABC):
    """One environment, for one episode after another. Local or remote, it fails the same way: by EnvironmentFailed.

    After such a failure, or a call that was cancelled, the answer to the next call could belong to the last one, or to
    another episode: the session refuses all further calls.
    """

    def __init__(self, environment: str, timeout: float) -> None:
        self.environment = environment
        self._timeout = timeout
        self._phase: Phase = "new"
        self._failure = ""
        self._calling = ""

    async def reset(self, seed: int) -> Observation:
        """Begin an episode. Raises EnvironmentFailed."""
        return await self._observe("reset", lambda: self._reset(seed))

    async def step(self, action: Action | str) -> Observation:
        """Take an action. Raises EnvironmentFailed; EpisodeOver if there is no running episode."""
        if self._phase in ("new", "over"):
            why = "no episode has begun" if self._phase == "new" else "the last one is over"
            raise EpisodeOver(self.environment, why)
        taken = Action(action) if isinstance(action, str) else action
        return await self._observe("step", lambda: self._step(taken))

    async def state(self) -> State:
        """Where the episode stands. Raises EnvironmentFailed."""
        return await self._call("state", self._state)

    @property
    def usable(self) -> bool:
        """Whether another episode may begin."""
        return self._phase not in ("failed", "closed") and not self._calling

    async def close(self) -> None:
        """Free the session, whatever state it is in. Further calls are refused."""
        if self._phase != "closed":
            failed, self._phase = self._phase == "failed", "closed"
            await self._close(failed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _observe(self, call: str, body: Callable[[], Awaitable[Observation]]) -> Observation:
        async def observed() -> Observation:
            return checked(await body(), self.environment, call)

        observation = await self._call(call, observed)
        if self._phase != "closed":
            self._phase = "over" if observation.done else "running"
        return observation

    async def _call(self, call: str, body: Callable[[], Awaitable[T]]) -> T:
        if self._calling:
            raise EnvironmentRefused(self.environment, call, f"{self._calling} is running: one call at a time")
        if self._phase == "closed":
            raise EnvironmentRefused(self.environment, call, "the session is closed; open another")
        if self._phase == "failed":
            raise EnvironmentRefused(self.environment, call, f"the session has failed ({self._failure}); open another")
        self._calling = call
        # While a call runs the session counts as failed: whatever ends it but an answer leaves it so.
        before, self._phase, self._failure = self._phase, "failed", f"{call} was cancelled"
        try:
            async with asyncio.timeout(limit := self._limit(call)):
                answer = await body()
        except TimeoutError as error:
            failure = EnvironmentHung(self.environment, call, f"no answer for {limit:.3g} s")
            self._give_up(failure)
            raise failure from error
        except EnvironmentFailed as error:
            self._give_up(error)
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._calling = ""
        if self._phase == "failed":  # else it was closed meanwhile
            self._phase = before
        return answer

    def _limit(self, call: str) -> float:
        """Seconds that a call may take."""
        return self._timeout

    def _give_up(self, failure: EnvironmentFailed) -> None:
        self._failure = f"{failure.call}: {failure.why}"
        self._abandon(failure)

    @abstractmethod
    def _abandon(self, error: BaseException) -> None:
        """A call has failed, or was cancelled: free what can be freed without waiting."""

    @abstractmethod
    async def _reset(self, seed: int) -> Observation: ...

    @abstractmethod
    async def _step(self, action: Action) -> Observation: ...

    @abstractmethod
    async def _state(self) -> State: ...

    @abstractmethod
    async def _close(self, failed: bool) -> None: ...
