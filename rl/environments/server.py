"""`EnvironmentServer`: environments for other processes, by OpenEnv's protocol over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import random
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, cast
from urllib.parse import urlsplit

import msgspec
from websockets.asyncio.server import Server, ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response

from holdfast.ft.console.units import counted
from holdfast.ft.control.event_loop import BoundedListener, Departure
from holdfast.rl.environments import messages
from holdfast.rl.environments.environment import Environment
from holdfast.rl.environments.local import CallThread, LocalSession
from holdfast.rl.environments.registry import check_environment, environment_factory
from holdfast.rl.errors import EnvironmentDied, EnvironmentFailed, EnvironmentHung, EnvironmentLied, EpisodeOver
from holdfast.rl.telemetry import WorkLog, processor_with_descendants

CODES: dict[type[EnvironmentFailed], str] = {
    EnvironmentDied: "EXECUTION_ERROR",
    EnvironmentHung: "STEP_TIMED_OUT",
    EnvironmentLied: "INVALID_OBSERVATION",
}
"""The words of the protocol for failures; all others are a VALIDATION_ERROR."""

_MOST_HANDSHAKES, _HANDSHAKE_SECONDS = 256, 10.0
"""The bounds of connections whose handshake is not done."""
_SEND_SECONDS = 10.0
_LOGGER = logging.getLogger("holdfast.rl.environments.server")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False  # a connection that breaks is no news


class Health(msgspec.Struct, frozen=True):
    """What `/health` tells: sessions in use, of how many, and how many of them hang in a call."""

    status: str
    environment: str
    sessions: int
    limit: int
    hung: int


class _Guest(ServerConnection):
    """A connection that may be dropped until its handshake is done."""

    def __init__(self, guests: BoundedListener, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._guests = guests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._guests.limit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guests.admit(self)
        super().connection_lost(exc)

    def turn_away(self, why: Departure) -> None:
        """Close the connection."""
        self.transport.abort()


class EnvironmentServer:
    """Serves an environment: each connection to `/ws` is a session with an environment of its own.

    `sessions` bounds their number. A session ends with its connection, at any error, and after `lease` seconds without
    a request. A call of an environment may take `timeout` seconds, a message has `MOST_BYTES` at most.
    `work` has all calls.
    """

    def __init__(
        self,
        factory: Callable[[], Environment],
        environment: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sessions: int = 64,
        lease: float = 300.0,
        timeout: float = 30.0,
    ) -> None:
        self.environment, self.limit = environment, sessions
        self.work = WorkLog(processor_with_descendants)
        self._factory, self._host, self._port = factory, host, port
        self._lease, self._timeout = lease, timeout
        self._sessions: set[LocalSession] = set()
        self._closed: set[LocalSession] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: Server | None = None
        self._guests = BoundedListener(_made_by_websockets, most=_MOST_HANDSHAKES, seconds=_HANDSHAKE_SECONDS)

    @property
    def url(self) -> str:
        """Where clients find it. Port 0 became a real one at the start."""
        if self._server is None:
            raise RuntimeError("the server has not started; use it as `async with`")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"ws://{f'[{host}]' if ':' in host else host}:{port}"

    def health(self) -> Health:
        """What `/health` tells."""
        hung = sum(1 for session in self._closed if session.at_work)
        status = "unhealthy" if hung == self.limit else "degraded" if hung else "healthy"
        return Health(status, self.environment, len(self._sessions), self.limit, hung)

    async def __aenter__(self) -> Self:
        self._server = await listen(
            self._serve,
            self._host,
            self._port,
            process_request=self._answer_http,
            create_connection=cast(type[ServerConnection], partial(_Guest, self._guests)),
            origins=[None],  # programs send none; a page in a browser must not reach into this machine
            compression=None,
            max_size=messages.MOST_BYTES,
            ping_interval=None,  # the lease ends sessions of clients that are gone
            close_timeout=1.0,
            logger=_LOGGER,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._guests.close()
        for handler in self._handlers:
            handler.cancel()  # its environment may hang
        await self._server.wait_closed()

    def _answer_http(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        match urlsplit(request.path).path:
            case "/ws":
                return None
            case "/health":
                answer = msgspec.json.encode(self.health()).decode()
            case _:
                return connection.respond(http.HTTPStatus.NOT_FOUND, "there is /ws, and /health\n")
        response = connection.respond(http.HTTPStatus.OK, answer)
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    async def _serve(self, connection: ServerConnection) -> None:
        handler = asyncio.ensure_future(self._lead(connection))
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        await asyncio.wait([handler])
        if not handler.cancelled():
            handler.result()

    async def _lead(self, connection: ServerConnection) -> None:
        self._guests.admit(cast(_Guest, connection))
        if len(self._sessions) >= self.limit:
            why = f"all of the {counted(self.limit, 'session')} of {self.environment} are taken"
            return await self._refuse(connection, "CAPACITY_REACHED", why)
        session = LocalSession(
            self._factory,
            self.environment,
            timeout=self._timeout,
            on_end=lambda: self._ended(session),
            work=self.work,
        )
        self._sessions.add(session)
        try:
            await self._converse(connection, session)
        except ConnectionClosed:
            pass
        except TimeoutError:
            await self._refuse(connection, "LEASE_EXPIRED", f"no request for {self._lease:.3g} s")
        except messages.MalformedMessage as error:
            await self._refuse(connection, error.code, error.why)
        except EpisodeOver as error:
            await self._refuse(connection, "EPISODE_OVER", str(error))
        except EnvironmentFailed as error:
            await self._refuse(connection, CODES.get(type(error), "VALIDATION_ERROR"), error.why)
        finally:
            self._closed.add(session)
            await session.close()

    async def _converse(self, connection: ServerConnection, session: LocalSession) -> None:
        while True:
            async with asyncio.timeout(self._lease):
                data = await connection.recv(decode=False)
            match messages.decode_request(data):
                case messages.ResetRequest(arguments):
                    session.name_episode(arguments.episode_id)
                    seed = arguments.seed if arguments.seed is not None else random.getrandbits(31)
                    reply: messages.Reply = messages.observation_to_wire(await session.reset(seed))
                case messages.StepRequest(fields):
                    reply = messages.observation_to_wire(await session.step(messages.action_from_wire(fields)))
                case messages.StateRequest():
                    reply = messages.state_to_wire(await session.state())
                case messages.CloseRequest():
                    return
            await self._send(connection, self._encode(session, reply))

    def _encode(self, session: LocalSession, reply: messages.Reply) -> bytes:
        try:
            data = messages.encode(reply)
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, "reply", error.why) from error
        if len(data) > messages.MOST_BYTES:
            raise EnvironmentLied(
                self.environment, "reply", f"{len(data):,} bytes, and the most is {messages.MOST_BYTES:,}"
            )
        return data

    async def _send(self, connection: ServerConnection, data: bytes) -> None:
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await connection.send(data, text=True)
        except TimeoutError as error:  # it reads nothing
            connection.transport.abort()
            raise ConnectionClosedError(None, None) from error

    async def _refuse(self, connection: ServerConnection, code: str, why: str) -> None:
        """Tell the client why its session ends."""
        with contextlib.suppress(ConnectionClosed):
            await self._send(connection, messages.encode(messages.ErrorReply(messages.ErrorData(why[:1000], code))))

    def _ended(self, session: LocalSession) -> None:
        self._sessions.discard(session)
        self._closed.discard(session)


def _made_by_websockets() -> NoReturn:
    raise AssertionError("websockets accepts the connections of this listener")


async def serve(
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    sessions: int = 64,
    lease: float = 300.0,
    timeout: float = 30.0,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve the environment of this name until the task is cancelled; `on_start` is told the URL.

    Before, it tries one.
    Raises UnknownEnvironment, and OSError for an address that is taken.
    """
    trying = CallThread(name)  # a daemon: an environment that hangs does not keep Ctrl-C from ending the process
    try:
        await trying.run(partial(check_environment, name))
    finally:
        trying.end(lambda: None)
    factory = environment_factory(name)
    async with EnvironmentServer(
        factory, name, host=host, port=port, sessions=sessions, lease=lease, timeout=timeout
    ) as server:
        if on_start is not None:
            on_start(server.url)
        await asyncio.get_running_loop().create_future()
