"""Sessions at servers of OpenEnv's protocol: a client of one, and a pool that avoids those that fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from holdfast.comms.errors import describe
from holdfast.ft.console.units import counted
from holdfast.rl.environments import messages
from holdfast.rl.environments.environment import Action, Observation, State
from holdfast.rl.environments.session import EnvironmentSession
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

    It never connects again: a new connection is a new environment, in which no episode has begun.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        super().__init__(url, timeout)
        self._url = websocket_url(url)
        self._connection: ClientConnection | None = None
        self.answered = False
        """Whether the last request had an answer, an error too."""

    async def connect(self) -> None:
        """Connect now, to find out whether the server is there. Raises EnvironmentFailed."""
        await self._call("connect", self._connected)

    async def _reset(self, seed: int) -> Observation:
        return await self._observed("reset", messages.ResetRequest(messages.ResetData(seed)))

    async def _step(self, action: Action) -> Observation:
        return await self._observed("step", messages.StepRequest(messages.action_to_wire(action)))

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
            return messages.observation_from_wire(reply.data)
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, call, error.why) from error

    async def _ask(self, call: str, request: messages.Request) -> messages.Reply:
        try:
            data = messages.encode(request)
        except messages.MalformedMessage as error:
            raise EnvironmentRefused(self.environment, call, error.why) from error
        connection = await self._connected()
        self.answered = False
        try:
            # A server that refuses the session says why and closes: what it said is read below.
            with contextlib.suppress(ConnectionClosed):
                await connection.send(data, text=True)
            reply = messages.decode_reply(await connection.recv(decode=False))
        except (WebSocketException, OSError) as error:
            raise EnvironmentDied(self.environment, call, f"the connection is lost: {describe(error)}") from error
        except messages.MalformedMessage as error:
            raise EnvironmentLied(self.environment, call, error.why) from error
        self.answered = True
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


class PooledServer:
    """A server as a pool sees it. `failures` counts the sessions that it lost, `sessions` those that take a place."""

    def __init__(self, url: str, address: str) -> None:
        self.url, self.address = url, address
        self.up, self.busy_until = True, 0.0
        self.sessions, self.failures, self.last_failure = 0, 0, ""
        self.idle: list[EnvironmentClient] = []
        """Sessions that are kept for the next lease."""

    @property
    def in_use(self) -> int:
        """Its sessions without those that are kept."""
        return self.sessions - len(self.idle)


class EnvironmentPool:
    """Leases sessions at the server with the fewest of them, and frees each session however it ends.

    There are at most `limit` at a server. A call of an environment may take `timeout` seconds; a reset, which may have
    to wait for a place, `wait` more. A session that fails marks its server as down, unless the failure is one of that
    episode alone. From then on a task in the background looks whether it takes connections again; until then it gets no
    session.

    With `keep`, a session that is freed stays open for the next lease: a connection costs more than a short episode.
    Its place stays taken at the server, so keep none at servers that others use too.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        timeout: float = 30.0,
        wait: float = 60.0,
        limit: int = 64,
        keep: bool = False,
    ) -> None:
        self.timeout, self.wait = timeout, wait
        self._servers: dict[str, PooledServer] = {}
        self._keep, self._limit = keep, limit
        self._changed = asyncio.Event()
        self._probes: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.set_servers(urls)
        self.environment = ",".join(self._servers)

    @property
    def servers(self) -> tuple[PooledServer, ...]:
        """The servers in use, as this pool sees them."""
        return tuple(self._servers.values())

    def set_servers(self, urls: Iterable[str]) -> None:
        """From now on use these servers. Sessions at others go on until they are closed."""
        wanted = {websocket_url(url): url for url in urls}
        if not wanted:
            raise UnknownEnvironment("", "a pool needs at least one server")
        known = {server.address: server for server in self._servers.values()}
        self._servers = {url: known.get(address) or PooledServer(url, address) for address, url in wanted.items()}
        for address in known.keys() - wanted.keys():
            self._drop_idle(known[address])
        self._changed.set()

    def session(self) -> PooledSession:
        """A session, to be used as `async with`. It takes a place at its first reset."""
        return PooledSession(self)

    async def lease(self, deadline: float) -> tuple[PooledServer, EnvironmentClient]:
        """A session at a server that took the connection. Waits, and raises EnvironmentFailed at the deadline."""
        while True:
            server = self._pick()
            if server is None:
                await self._wait_for_change(deadline)
                continue
            if server.idle:
                return server, server.idle.pop()
            client = self._client(server)
            server.sessions += 1
            try:
                await client.connect()
            except BaseException as error:
                self.release(server, client, error)
                if not isinstance(error, EnvironmentFailed) or time.monotonic() >= deadline:
                    raise
            else:
                return server, client

    def give_back(self, server: PooledServer, client: EnvironmentClient) -> asyncio.Task[None] | None:
        """Keep a session that has not failed for the next lease, or close it in a task, which is returned."""
        if not (self._keep and client.usable and server.up and server in self.servers):
            return self.release(server, client)
        server.idle.append(client)
        self._changed.set()
        return None

    def release(
        self, server: PooledServer, client: EnvironmentClient, error: BaseException | None = None
    ) -> asyncio.Task[None]:
        """Free a leased session, which may have failed by `error`; does not wait.

        A server that does not answer is down, and one that can begin no episode. A step that fails says nothing.
        """
        if isinstance(error, EnvironmentFailed):
            server.last_failure = f"{error.call}: {error.why}"
            if isinstance(error, EnvironmentBusy):
                server.busy_until = time.monotonic() + BUSY_SECONDS
            else:
                server.failures += 1
                if server.up and not (client.answered and error.call == "step"):
                    server.up = False
                    self._drop_idle(server)
                    self._begin(self._probe(server), self._probes)
        return self._begin(self._free(server, client), self._closing)

    async def close(self) -> None:
        """Stop looking for servers, and wait until all released sessions are closed. Those still in use go on."""
        self._keep = False
        for server in self._servers.values():
            self._drop_idle(server)
        while waiting := self._probes | self._closing:
            for probe in self._probes:  # a session that fails meanwhile begins another one
                probe.cancel()
            await asyncio.wait(waiting)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _client(self, server: PooledServer) -> EnvironmentClient:
        return EnvironmentClient(server.url, timeout=self.timeout)

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def _free(self, server: PooledServer, client: EnvironmentClient) -> None:
        try:
            await client.close()
        finally:
            server.sessions -= 1
            self._changed.set()

    def _pick(self) -> PooledServer | None:
        now = time.monotonic()
        usable = [
            each
            for each in self._servers.values()
            if each.up and (each.idle or (each.sessions < self._limit and each.busy_until <= now))
        ]
        return min(usable, key=lambda server: server.in_use, default=None)

    def _drop_idle(self, server: PooledServer) -> None:
        """Close the sessions that are kept at a server."""
        while server.idle:
            self.release(server, server.idle.pop())

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(retry, deadline) - now):
                await self._changed.wait()

    async def _probe(self, server: PooledServer) -> None:
        """Mark a server as up once it begins an episode, or says that it has no place for one more."""
        pause = FIRST_PROBE
        while server in self.servers:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PROBE)
            try:
                async with self._client(server) as client:
                    await client.reset(0)
            except EnvironmentBusy:
                pass
            except EnvironmentFailed as error:
                server.last_failure = f"{error.call}: {error.why}"
                continue
            server.up = True
            self._changed.set()
            return


_ATTEMPTS = 3
"""How many environments a reset tries: an episode that has not begun can begin elsewhere. One that only finds a server
full has tried none.
"""


class PooledSession(EnvironmentSession):
    """A session of a pool. After a failure, reset it: the next episode is played by another environment."""

    def __init__(self, pool: EnvironmentPool) -> None:
        super().__init__(pool.environment, pool.timeout)
        self._pool = pool
        self._leased: tuple[PooledServer, EnvironmentClient] | None = None

    async def reset(self, seed: int) -> Observation:
        """Begin an episode, with another environment if the one before has failed. Raises EnvironmentFailed."""
        if self._phase == "failed" and not self._calling:
            self._phase = "new"
        return await super().reset(seed)

    async def _reset(self, seed: int) -> Observation:
        deadline, left = time.monotonic() + self._pool.wait, _ATTEMPTS
        while True:
            try:
                if self._leased is None:
                    self._leased = await self._pool.lease(deadline)
                return await self._leased[1].reset(seed)
            except EnvironmentBusy as error:
                self._abandon(error)
                if time.monotonic() >= deadline:
                    raise
            except EnvironmentFailed as error:
                self._abandon(error)
                left -= 1
                if not left:
                    raise

    async def _step(self, action: Action) -> Observation:
        assert self._leased is not None, "a running episode has an environment"
        return await self._leased[1].step(action)

    async def _state(self) -> State:
        return await self._leased[1].state() if self._leased is not None else State()

    def _limit(self, call: str) -> float:
        # The leased session and the lease have limits of their own, and better messages: these come first.
        return self._timeout + 1.0 + self._pool.wait * (call == "reset")

    def _abandon(self, error: BaseException) -> None:
        leased, self._leased = self._leased, None
        if leased is not None:
            self._pool.release(*leased, error)

    async def _close(self, failed: bool) -> None:
        leased, self._leased = self._leased, None
        if leased is not None and (closing := self._pool.give_back(*leased)) is not None:
            await closing
