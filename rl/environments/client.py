"""`EnvironmentClient`: one session at a server that speaks OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from holdfast.comms.errors import describe
from holdfast.rl.environments import messages
from holdfast.rl.environments.environment import Action, Observation, State
from holdfast.rl.environments.errors import (
    EnvironmentBusy,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentLied,
    EnvironmentRefused,
    UnknownEnvironment,
)
from holdfast.rl.environments.messages import TEXT, TextFields
from holdfast.rl.environments.session import EnvironmentSession

_KINDS: dict[str, type[EnvironmentFailed]] = {
    "CAPACITY_REACHED": EnvironmentBusy,
    "EXECUTION_ERROR": EnvironmentDied,
    "FACTORY_ERROR": EnvironmentDied,
    "INVALID_OBSERVATION": EnvironmentLied,
    "LEASE_EXPIRED": EnvironmentDied,
    "SESSION_ERROR": EnvironmentDied,
    "STEP_TIMED_OUT": EnvironmentHung,
}
"""What an error code of a server means; all others say that it refused the request."""

_CLOSE_SECONDS = 1.0
_LOGGER = logging.getLogger("holdfast.rl.environments.client")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False  # errors are raised


class EnvironmentClient(EnvironmentSession):
    """A session at `url` (`ws://host:port`, or `http://`), connected at its first call. Close it, or use `async with`.

    It never connects again: a new connection is a new environment, in which no episode has begun. `texts` names the
    fields that hold the text of actions and observations, where the environment's author called them otherwise.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        max_bytes: int = 1 << 20,
        texts: TextFields = TEXT,
    ) -> None:
        super().__init__(url, timeout)
        self._url = websocket_url(url)
        self._connect_timeout, self._max_bytes, self._texts = connect_timeout, max_bytes, texts
        self._connection: ClientConnection | None = None
        self._answered = False  # whether the last request had an answer, an error too

    async def connect(self) -> None:
        """Connect now, to find out whether the server is there. Raises EnvironmentFailed."""
        await self._call("connect", self._connected)

    async def _reset(self, seed: int) -> Observation:
        return await self._observed("reset", messages.ResetRequest(messages.ResetData(seed)))

    async def _step(self, action: Action) -> Observation:
        return await self._observed("step", messages.StepRequest(messages.action_to_wire(action, self._texts)))

    async def _state(self) -> State:
        reply = await self._ask("state", messages.StateRequest())
        if not isinstance(reply, messages.StateReply):
            raise EnvironmentLied(self.environment, "state", f"it answered by {type(reply).__name__}")
        try:
            return messages.state_from_wire(reply.data)
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, "state", error.why) from error

    async def _observed(self, call: str, request: messages.Request) -> Observation:
        reply = await self._ask(call, request)
        if not isinstance(reply, messages.ObservationReply):
            raise EnvironmentLied(self.environment, call, f"it answered by {type(reply).__name__}")
        try:
            return messages.observation_from_wire(reply.data, self._texts)
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, call, error.why) from error

    async def _ask(self, call: str, request: messages.Request) -> messages.Reply:
        try:
            data = messages.encode(request)
        except messages.MalformedMessage as error:
            raise EnvironmentRefused(self.environment, call, error.why) from error
        connection = await self._connected()
        self._answered = False
        try:
            # A server that refuses the session says why and closes: what it said is read below.
            with contextlib.suppress(ConnectionClosed):
                await connection.send(data, text=True)
            reply = messages.decode_reply(await connection.recv(decode=False))
        except (WebSocketException, OSError) as error:
            raise EnvironmentDied(self.environment, call, f"the connection is lost: {describe(error)}") from error
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, call, error.why) from error
        self._answered = True
        if isinstance(reply, messages.ErrorReply):
            said = reply.data
            raise _KINDS.get(said.code, EnvironmentRefused)(self.environment, call, f"{said.message} ({said.code})")
        return reply

    async def _connected(self) -> ClientConnection:
        if self._connection is None:
            try:
                self._connection = await connect(
                    self._url,
                    open_timeout=self._connect_timeout,
                    compression=None,
                    max_size=self._max_bytes,
                    ping_interval=None,  # every call has a deadline
                    close_timeout=_CLOSE_SECONDS,
                    proxy=None,
                    logger=_LOGGER,
                )
            except TimeoutError as error:
                why = f"it did not take the connection within {self._connect_timeout:.3g} s"
                raise EnvironmentHung(self.environment, "connect", why) from error
            except (WebSocketException, OSError) as error:
                raise EnvironmentDied(self.environment, "connect", describe(error)) from error
        return self._connection

    def _abandon(self, error: BaseException) -> None:
        if self._connection is not None:
            self._connection.transport.abort()

    async def _close(self, failed: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not failed:
            with contextlib.suppress(WebSocketException, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await connection.close()
        connection.transport.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connection.wait_closed(), _CLOSE_SECONDS)


def websocket_url(url: str) -> str:
    """The address of the sessions of a server. Raises UnknownEnvironment for a URL that is none."""
    scheme, host, path, query, _ = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(scheme, scheme)
    if scheme not in ("ws", "wss") or not host:
        raise UnknownEnvironment(url, "a server has a URL such as ws://host:port")
    return urlunsplit((scheme, host, path.removesuffix("/").removesuffix("/ws") + "/ws", query, ""))
