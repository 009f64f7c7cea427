"""Authenticated connections for remote calls, in asyncio: `AsyncRpcServer` and `dial_rpc` give `RpcConnection`s.

Addresses are "host:port". A server listens on one interface (loopback unless said otherwise), never on all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import cast

from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import local_cause
from holdfast.ft.control.bounded_listener import BoundedListener, Departure
from holdfast.ft.control.connection import CLOSED_HERE, CLOSED_THERE, Handler, RpcConnection
from holdfast.ft.control.errors import Busy, CallTimeout, ConnectionLost, ControlError, Dropped, cannot_connect
from holdfast.ft.control.frames import DiallerHandshake, ListenerHandshake, refusal
from holdfast.ft.environment.listen_address import check_interface, join_address, split_address

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_PENDING = 256
"""The most unauthenticated connections that a server holds; when one more comes, the oldest is dropped."""

UNACKNOWLEDGED_SECONDS = 4
"""How long the other host may leave bytes unacknowledged before the connection is given up.

The kernel would wait for many minutes, and after a cable is plugged in again for as long as it had been out.
"""

_CLOSE_SECONDS = 0.5  # that connections get to send what is pending, and once more to end
_MAX_DROPS = 5  # in a row, before a dialler gives up on a listener that drops it without a word


class _Wire(asyncio.Protocol):
    """One socket: the handshake, and then what its `connection` receives."""

    def __init__(
        self,
        handshake: DiallerHandshake | ListenerHandshake,
        handlers: Mapping[str, Handler],
        established: Callable[[_Wire, RpcConnection], None],
        ended: Callable[[_Wire, ControlError], None],
        address: str,
    ) -> None:
        self._handshake, self._handlers = handshake, handlers
        self._established, self._ended, self._address = established, ended, address
        self.connection: RpcConnection | None = None
        self.transport: asyncio.Transport | None = None
        self._failed = False
        self._number = -1

    def fileno(self) -> int:
        """The socket's number while it is open; -1 otherwise."""
        return self._number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self._failed:
            self.transport.abort()
            return
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNACKNOWLEDGED_SECONDS)
        self._number = sock.fileno()
        forks.release_socket_in_children(self)
        if isinstance(self._handshake, DiallerHandshake):
            self.transport.write(self._handshake.hello())

    def data_received(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection.take(data)
        elif not self._failed and self.transport is not None:
            try:
                self.transport.write(self._handshake.receive(data))
            except ControlError as error:
                self._fail(error, self._handshake.farewell)
                return
            if self._handshake.session is not None:
                self.connection = RpcConnection(self._handshake.session, self.transport, self._handlers)
                self._established(self, self.connection)
                self.connection.take(b"")

    def _fail(self, error: ControlError, farewell: bytes = b"") -> None:
        """Give up the handshake."""
        if self._failed or self.connection is not None:
            return
        self._failed = True
        if self.transport is not None:
            self.transport.write(farewell)
            self.transport.close()
        self._ended(self, error)

    def turn_away(self, why: Departure) -> None:
        """Give up the handshake with a dialler."""
        if why == "full":
            self._fail(Busy("turned away for newer connections"), refusal("busy"))
        elif why == "late":
            self._fail(ConnectionLost("a dialler", f"did not authenticate within {HANDSHAKE_SECONDS:g} s"))
        else:
            self._fail(ConnectionLost("a dialler", CLOSED_HERE))

    def connection_lost(self, error: Exception | None) -> None:
        self._number = -1
        if self.connection is not None:
            self.connection.socket_closed(error)
            self._ended(self, self.connection.lost or ConnectionLost(self._address, CLOSED_THERE))
        else:
            self._fail(Dropped(self._address, f"{CLOSED_THERE} during the handshake"))


class AsyncRpcServer:
    """Serves remote calls in the running event loop, to diallers that authenticate in time.

    `on_connect` is called in the loop for each connection. `connections` are the open ones: through them the server can
    call or notify its clients. `address` is the "host:port" to dial; "" before `start`.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        identity: str,
        handlers: Mapping[str, Handler],
        on_connect: Callable[[RpcConnection], None] | None = None,
    ) -> None:
        ListenerHandshake(key, job, identity)  # says at once what is wrong with the arguments
        self.address = ""
        self._key, self._job, self._identity = key, job, identity
        self._handlers, self._on_connect = handlers, on_connect
        self._open: dict[_Wire, RpcConnection] = {}
        self._listener = BoundedListener(self._accept, most=MAX_PENDING, seconds=HANDSHAKE_SECONDS)

    @property
    def connections(self) -> set[RpcConnection]:
        return {connection for connection in self._open.values() if connection.lost is None}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind and listen; port 0 takes a free one.

        Raises TypeError and ValueError for a host that is not one interface, OSError if it cannot be bound.
        """
        check_interface(host)
        self.address = join_address(*await self._listener.start(host, port))

    def _accept(self) -> _Wire:
        handshake = ListenerHandshake(self._key, self._job, self._identity)
        return _Wire(handshake, self._handlers, self._established, self._ended, self.address)

    def _established(self, wire: _Wire, connection: RpcConnection) -> None:
        self._listener.admit(wire)
        self._open[wire] = connection
        if self._on_connect is not None:
            self._on_connect(connection)

    def _ended(self, wire: _Wire, error: ControlError) -> None:
        self._listener.admit(wire)
        if self._open.pop(wire, None) is None:
            _log.debug("%s turned away a connection: %s", self._identity, error)

    async def close(self) -> None:
        """Stop listening, end every connection and cancel its running handlers. Idempotent."""
        self._listener.close()
        connections = list(self._open.values())
        for connection in connections:
            connection.close()
        if connections:
            closing = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)
            for connection in connections:
                connection.abort()
            await asyncio.wait(closing, timeout=_CLOSE_SECONDS)


async def dial_rpc(
    address: str,
    *,
    key: bytes,
    job: str,
    identity: str,
    handlers: Mapping[str, Handler] | None = None,
    timeout: float = HANDSHAKE_SECONDS,
) -> RpcConnection:
    """Connect to an `AsyncRpcServer`; `handlers` serve its calls to this side.

    Raises, as soon as it is known and after `timeout` seconds at the latest: `WrongKey`, `WrongJob`, `UnknownVersion`
    or another `BadFrame` if the server is not one of this job (it then has learnt nothing but our identity);
    `ConnectionLost` if no process listens; `Busy` if the server dropped it for other connections until the end;
    `CallTimeout` (an `OpTimeout`) if there was no answer; ValueError for an invalid address.
    """
    split_address(address)
    started, drops = time.monotonic(), 0
    deadline = started + timeout
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await _dial_once(address, DiallerHandshake(key, job, identity), handlers or {})
        except TimeoutError as error:
            raise CallTimeout("the handshake", address, time.monotonic() - started) from error
        except (Busy, Dropped) as error:
            drops += 1
            pause = random.uniform(0.005, 0.05)
            if (isinstance(error, Dropped) and drops > _MAX_DROPS) or time.monotonic() + pause > deadline:
                raise
            await asyncio.sleep(pause)


async def _dial_once(address: str, handshake: DiallerHandshake, handlers: Mapping[str, Handler]) -> RpcConnection:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[RpcConnection] = loop.create_future()
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited

    def established(wire: _Wire, connection: RpcConnection) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            result.set_result(connection)

    def ended(wire: _Wire, error: ControlError) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            result.set_exception(error)

    wire = _Wire(handshake, handlers, established, ended, address)
    try:
        await loop.create_connection(lambda: wire, *split_address(address))
        return await result
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        if (cause := local_cause(error, f"a connection to {address}")) is not None:
            raise cause from error
        raise cannot_connect(address, error) from error
    except asyncio.CancelledError:
        if wire.transport is not None:
            wire.transport.abort()
        raise
