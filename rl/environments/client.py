"""Sessions at servers of OpenEnv's protocol: a client of one, and a pool that avoids those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from holdfast.comms.errors import describe
from holdfast.ft.console.units import counted
from holdfast.rl.environments import messages
from holdfast.rl.environments.environment import Action, Observation, State
from holdfast.rl.environments.messages import TEXT, TextFields
from holdfast.rl.environments.session import EnvironmentSession, SessionSource
from holdfast.rl.errors import (
    EnvironmentBusy,
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentHung,
    EnvironmentLied,
    EnvironmentRefused,
    UnknownEnvironment,
)

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

_CONNECT_SECONDS, _CLOSE_SECONDS = 5.0, 1.0
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
        texts: TextFields = TEXT,
    ) -> None:
        super().__init__(url, timeout)
        self._url = websocket_url(url)
        self._texts = texts
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
                    open_timeout=_CONNECT_SECONDS,
                    compression=None,
                    max_size=messages.MOST_BYTES,
                    ping_interval=None,  # every call has a deadline
                    close_timeout=_CLOSE_SECONDS,
                    proxy=None,
                    logger=_LOGGER,
                )
            except TimeoutError as error:
                why = f"it did not take the connection within {_CONNECT_SECONDS:.3g} s"
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


FIRST_PROBE, LAST_PROBE = 0.1, 5.0
"""Seconds from a failure to the first look whether the server is back; each further pause is twice as long."""

BUSY_SECONDS = 0.2
"""How long a server counts as full after it said so; other clients free places at any time."""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A server as a pool sees it. `failures` counts the sessions that it lost."""

    url: str
    up: bool
    sessions: int
    failures: int
    last_failure: str


class EnvironmentPool(SessionSource):
    """Leases sessions at the server with the fewest, at most `limit` at each.

    A session that fails marks its server as down, unless the failure is one of that episode alone. From then on a task
    in the background looks whether it takes connections again; until then it gets no session.

    With `keep`, a session that is freed stays open for the next lease: a connection costs more than a short episode.
    Its place stays taken at the server, so keep none at servers that others use too.
    """

    attempts = 3

    def __init__(
        self,
        urls: Iterable[str],
        *,
        timeout: float = 30.0,
        wait: float = 60.0,
        limit: int = 64,
        texts: TextFields = TEXT,
        keep: bool = False,
    ) -> None:
        self._servers: dict[str, _PooledServer] = {}
        self._keep = keep
        self.texts = texts
        self._limit = limit
        self._changed = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self.set_servers(urls)
        super().__init__(",".join(self._servers), timeout=timeout, wait=wait)

    def set_servers(self, urls: Iterable[str]) -> None:
        """From now on use these servers. Sessions at others go on until they are closed."""
        wanted = {websocket_url(url): url for url in urls}
        if not wanted:
            raise UnknownEnvironment("", "a pool needs at least one server")
        known = {server.address: server for server in self._servers.values()}
        self._servers = {url: known.get(address) or _PooledServer(url, address) for address, url in wanted.items()}
        for address in known.keys() - wanted.keys():
            self._drop_idle(known[address])
        self._change()

    def status(self) -> tuple[ServerStatus, ...]:
        """Each server, as this pool sees it."""
        return tuple(
            ServerStatus(
                url=url, up=each.up, sessions=each.in_use, failures=each.failures, last_failure=each.last_failure
            )
            for url, each in self._servers.items()
        )

    async def lease(self) -> EnvironmentSession:
        """A session at a server that took the connection. Waits, and raises EnvironmentFailed after `wait` seconds."""
        deadline = time.monotonic() + self.wait
        while True:
            server = self._pick()
            if server is None:
                await self._wait_for_change(deadline)
                continue
            if server.idle:
                return server.idle.pop()
            client = _PooledClient(self, server)
            try:
                await client.connect()
            except EnvironmentFailed:
                await client.close()
                if time.monotonic() >= deadline:
                    raise
            except BaseException:
                await client.close()
                raise
            else:
                return client

    async def give_back(self, session: EnvironmentSession) -> None:
        """Keep a session for the next lease, or close it."""
        if not (self._keep and isinstance(session, _PooledClient) and session.usable and self._has(session.server)):
            await session.close()
            return
        session.server.idle.append(session)
        self._change()

    async def close(self) -> None:
        """Stop looking for servers, and wait until all released sessions are closed."""
        self._keep = False
        for server in self._servers.values():
            self._drop_idle(server)
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await super().close()

    def _pick(self) -> _PooledServer | None:
        now = time.monotonic()
        usable = [
            each
            for each in self._servers.values()
            if each.up and (each.idle or (each.sessions < self._limit and each.busy_until <= now))
        ]
        return min(usable, key=lambda server: server.in_use, default=None)

    def _has(self, server: _PooledServer) -> bool:
        return server.up and server in self._servers.values()

    def _drop_idle(self, server: _PooledServer) -> None:
        """Close the sessions that are kept at a server."""
        while server.idle:
            self.release(server.idle.pop())

    async def _wait_for_change(self, deadline: float) -> None:
        """Wait until a session is freed or a server is back. Raises EnvironmentFailed at the deadline."""
        self._changed.clear()
        busy = [each for each in self._servers.values() if each.up]
        now = time.monotonic()
        if now >= deadline:
            if busy:
                why = f"all sessions at {counted(len(busy), 'server')} were taken for {self.wait:.3g} s"
                raise EnvironmentBusy(self.environment, "reset", why)
            said = "; ".join(f"{each.url}: {each.last_failure}" for each in self._servers.values())
            raise EnvironmentDied(self.environment, "reset", f"no server was there for {self.wait:.3g} s: {said}")
        retry = min((each.busy_until for each in busy if each.busy_until > now), default=deadline)
        try:
            async with asyncio.timeout(min(retry, deadline) - now):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _change(self) -> None:
        self._changed.set()

    def freed(self, server: _PooledServer) -> None:
        """A session at this server is closed."""
        server.sessions -= 1
        self._change()

    def failed(self, server: _PooledServer, error: EnvironmentFailed, *, answered: bool) -> None:
        """A session at this server failed, by its own answer or without one.

        A server that does not answer is down, and one that can begin no episode. A step that fails says nothing.
        """
        server.last_failure = f"{error.call}: {error.why}"
        if error.kind == "busy":
            server.busy_until = time.monotonic() + BUSY_SECONDS
            return
        server.failures += 1
        if server.up and not (answered and error.call == "step"):
            server.up = False
            self._drop_idle(server)
            probe = asyncio.ensure_future(self._probe(server))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe(self, server: _PooledServer) -> None:
        """Mark a server as up once it begins an episode, or says that it has no place for one more."""
        pause = FIRST_PROBE
        while server in self._servers.values():
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PROBE)
            try:
                async with EnvironmentClient(server.url, timeout=self.timeout, texts=self.texts) as client:
                    await client.reset(0)
            except EnvironmentBusy:
                pass
            except EnvironmentFailed as error:
                server.last_failure = f"{error.call}: {error.why}"
                continue
            server.up = True
            self._change()
            return


class _PooledServer:
    """What a pool knows of a server."""

    def __init__(self, url: str, address: str) -> None:
        self.url, self.address = url, address
        self.up, self.busy_until = True, 0.0
        self.sessions, self.failures, self.last_failure = 0, 0, ""
        self.idle: list[_PooledClient] = []

    @property
    def in_use(self) -> int:
        """Its sessions without those that are kept for the next lease."""
        return self.sessions - len(self.idle)


class _PooledClient(EnvironmentClient):
    """A client that tells its pool when it fails and when it is closed."""

    def __init__(self, pool: EnvironmentPool, server: _PooledServer) -> None:
        super().__init__(server.url, timeout=pool.timeout, texts=pool.texts)
        self._pool, self.server = pool, server
        server.sessions += 1

    def _abandon(self, error: BaseException) -> None:
        super()._abandon(error)
        if isinstance(error, EnvironmentFailed):
            self._pool.failed(self.server, error, answered=self._answered)

    async def _close(self, failed: bool) -> None:
        try:
            await super()._close(failed)
        finally:
            self._pool.freed(self.server)
