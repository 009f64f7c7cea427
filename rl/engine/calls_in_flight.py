"""The driver's side of an actor that every engine shares: calls in flight, and the end of its process."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from holdfast.ft.processes.packed_errors import unpack_error
from holdfast.ft.processes.remote_calls import CallResult, MethodCall, pack, unpack
from holdfast.rl.engine.endpoint import endpoint_of
from holdfast.rl.engine.engine import STOPPED, OnExit
from holdfast.rl.engine.errors import ActorDied, ActorStartFailed, EndpointFailed, EndpointTimeout

START_SECONDS = 180.0
"""Seconds in which an actor must be made; its constructor may load a model."""

MADE = 0
"""The number of the answer that says that the actor is made."""

PING = "(ping)"
"""The name of the call that every process answers by itself."""


class CallsInFlight(ABC):
    """Base of the handles of actors: numbers the calls, and ends them with the process."""

    def __init__(self, name: str, kind: type[Any], pid: int, host: str, on_exit: OnExit | None) -> None:
        self.name, self.pid, self.host = name, pid, host
        self._kind, self._on_exit = kind, on_exit
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._how = ""
        self._stopping = self._started = False

    @property
    def alive(self) -> bool:
        """False once the end of the process was seen."""
        return not self._how

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """See `ActorProcess.call`."""
        endpoint_of(self._kind, method)
        return self._value(method, await self._ask(method, pack(MethodCall(method, args, kwargs)), timeout))

    async def ping(self, timeout: float) -> None:
        """See `ActorProcess.ping`."""
        await self._ask(PING, b"", timeout)

    @abstractmethod
    def kill(self) -> None:
        """See `ActorProcess.kill`."""

    @abstractmethod
    def _send(self, number: int, request: bytes) -> None:
        """Send a request, empty for a ping; `_answered` is called with the answer."""

    async def _ask(self, method: str, request: bytes, timeout: float | None) -> bytes:
        if self._how:
            raise ActorDied(self.name, self.pid, self._how, method)
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                self._send(number, request)
                found: bytes = await answer
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EndpointTimeout(self.name, self.pid, method, timeout or 0.0) from None
        finally:
            self._waiting.pop(number, None)
        if not found:
            raise ActorDied(self.name, self.pid, self._how, method)
        return found

    def _value(self, method: str, answer: bytes) -> Any:
        found: CallResult = unpack(answer)
        if found.error is None:
            return found.value
        error = EndpointFailed(self.name, method, found.error.summary, found.error.trace)
        raise error from unpack_error(found.error)

    def _answered(self, number: int, answer: bytes) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _ended(self, how: str) -> None:
        """Record the end of the process: fail all calls, and tell it once."""
        if self._how:
            return
        self._how = STOPPED if self._stopping else how
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(b"")
        if self._started and self._on_exit is not None:
            self._on_exit(self._how)

    async def _until_made(self, answer: asyncio.Future[bytes], timeout: float) -> None:
        """Wait for the answer to the making of the actor. Raises `ActorStartFailed`."""
        try:
            async with asyncio.timeout(timeout):
                made = await answer
            if not made:
                raise ActorStartFailed(self.name, self._how)
            self._value("__init__", made)
        except TimeoutError:
            raise ActorStartFailed(self.name, f"it is not made after {timeout:.3g} s") from None
        except EndpointFailed as error:
            raise ActorStartFailed(self.name, f"{error.summary}\n\n{error.trace}") from error.__cause__
        finally:
            self._waiting.pop(MADE, None)
        self._started = True

    async def _close_actor(self, timeout: float) -> None:
        """Call the actor's own `close`, if it has one; whatever comes of it, the process ends next."""
        self._stopping = True
        if self.alive and callable(getattr(self._kind, "close", None)):
            try:
                await self.call("close", timeout=timeout)
            except (ActorDied, EndpointTimeout, EndpointFailed):
                pass


def merged(*environments: Mapping[str, str] | None) -> dict[str, str]:
    """One environment: later ones win."""
    return {name: value for each in environments for name, value in (each or {}).items()}
