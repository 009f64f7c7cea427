"""Authenticated connections over TCP, in asyncio: `Listener` and `dial`, which both give `Connection`s.

Addresses are "host:port". A listener binds to one interface (loopback unless said otherwise), never to all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from typing import cast

from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import local_cause
from holdfast.ft.control.bounded_listener import BoundedListener, Departure
from holdfast.ft.control.connection import CLOSED_HERE, CLOSED_THERE, Connection
from holdfast.ft.control.errors import Busy, CallTimeout, ConnectionLost, ControlError, Dropped, cannot_connect
from holdfast.ft.control.frames import DEFAULT_LIMIT, DiallerHandshake, ListenerHandshake, refusal
from holdfast.ft.control.interface import check_interface

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
MAX_PENDING = 256
"""The most unauthenticated connections that a listener holds; when one more comes, the oldest is dropped."""

UNACKNOWLEDGED_SECONDS = 4
"""How long the other host may leave bytes unacknowledged before the connection is given up.

The kernel would wait for many minutes, and after a cable is plugged in again for as long as it had been out.
"""

_MAX_DROPS = 5  # in a row, before a dialler gives up on a listener that drops it without a word


def join_address(host: str, port: int) -> str:
    """The address "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; ValueError if it is not one."""
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not a control address: write host:port")
    return host, int(port)


class _Wire(asyncio.Protocol):
    """One socket, from the first byte of the handshake on."""

    def __init__(
        self,
        handshake: DiallerHandshake | ListenerHandshake,
        established: Callable[[_Wire, Connection], None],
        ended: Callable[[_Wire, ControlError], None],
        address: str,
        seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._handshake, self._established, self._ended = handshake, established, ended
        self._address, self._seconds = address, seconds
        self.connection: Connection | None = None
        self.transport: asyncio.Transport | None = None
        self.failed = False
        self._number = -1

    def fileno(self) -> int:
        """The socket's number while it is open; -1 otherwise."""
        return self._number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.failed:
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
        elif not self.failed and self.transport is not None:
            try:
                self.transport.write(self._handshake.receive(data))
            except ControlError as error:
                self.fail(error, getattr(self._handshake, "farewell", b""))
                return
            if self._handshake.session is not None:
                self.connection = Connection(self._handshake.session, self.transport)
                self._established(self, self.connection)
                self.connection.take(b"")

    def fail(self, error: ControlError, farewell: bytes = b"") -> None:
        """Give up the handshake."""
        if self.failed or self.connection is not None:
            return
        self.failed = True
        if self.transport is not None:
            self.transport.write(farewell)
            self.transport.close()
        self._ended(self, error)

    def turn_away(self, why: Departure) -> None:
        """Give up the handshake with a dialler."""
        if why == "full":
            self.fail(Busy("turned away for newer connections"), refusal("busy"))
        elif why == "late":
            self.fail(ConnectionLost("a dialler", f"did not authenticate within {self._seconds:g} s"))
        else:
            self.fail(ConnectionLost("a dialler", CLOSED_HERE))

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.hold_writing(True)

    def resume_writing(self) -> None:
        if self.connection is not None:
            self.connection.hold_writing(False)

    def connection_lost(self, error: Exception | None) -> None:
        self._number = -1
        if self.connection is not None:
            self.connection.socket_closed(error)
            self._ended(self, self.connection.lost or ConnectionLost(self._address, CLOSED_THERE))
        else:
            self.fail(Dropped(self._address, f"{CLOSED_THERE} during the handshake"))


class Listener:
    """Listens on one interface. `on_connection` gets each connection that authenticates.

    A dialler that fails the handshake, or takes longer than `handshake_timeout` seconds, is turned away; `refused`
    counts these.
    """

    def __init__(
        self,
        on_connection: Callable[[Connection], None],
        *,
        key: bytes,
        job: str,
        identity: str,
        limit: int = DEFAULT_LIMIT,
        handshake_timeout: float = HANDSHAKE_SECONDS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        ListenerHandshake(key, job, identity, limit)  # says at once what is wrong with the arguments
        self.address = ""
        self.refused = 0
        self._on_connection = on_connection
        self._key, self._job, self._identity, self._limit = key, job, identity, limit
        self._timeout = handshake_timeout
        self._open: set[_Wire] = set()
        self._listener = BoundedListener(self._accept, most=max_pending, seconds=handshake_timeout)

    async def start(self, host: str, port: int) -> None:
        """Bind and listen; port 0 takes a free one.

        Raises TypeError and ValueError for a host that is not one interface, OSError if it cannot be bound.
        """
        check_interface(host)
        self.address = join_address(*await self._listener.start(host, port))

    def _accept(self) -> _Wire:
        handshake = ListenerHandshake(self._key, self._job, self._identity, self._limit)
        return _Wire(handshake, self._established, self._ended, self.address, self._timeout)

    def _established(self, wire: _Wire, connection: Connection) -> None:
        self._listener.admit(wire)
        self._open.add(wire)
        self._on_connection(connection)

    def _ended(self, wire: _Wire, error: ControlError) -> None:
        self._listener.admit(wire)
        if wire not in self._open:
            self.refused += 1
            _log.debug("%s turned away a connection: %s", self._identity, error)
        self._open.discard(wire)

    async def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        self._listener.close()
        connections = [wire.connection for wire in self._open if wire.connection is not None]
        for connection in connections:
            connection.close()
        if connections:
            closing = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            await asyncio.wait(closing, timeout=0.5)
            for connection in connections:
                connection.abort()
            await asyncio.wait(closing, timeout=0.5)


async def dial(
    address: str,
    *,
    key: bytes,
    job: str,
    identity: str,
    limit: int = DEFAULT_LIMIT,
    timeout: float = HANDSHAKE_SECONDS,
) -> Connection:
    """Connect to a listener. Raises, as soon as it is known and after `timeout` seconds at the latest:

    `WrongKey`, `WrongJob`, `UnknownVersion` or another `BadFrame` if the listener is not one of this job (it then has
    learnt nothing but our identity); `ConnectionLost` if no process listens; `Busy` if the listener dropped it for
    other connections until the end; `CallTimeout` (an `OpTimeout`) if there was no answer; ValueError for an invalid
    address.
    """
    host, port = split_address(address)
    started = time.monotonic()
    deadline, drops = started + timeout, 0
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await _dial_once(host, port, DiallerHandshake(key, job, identity, limit), address)
        except TimeoutError as error:
            raise CallTimeout("the handshake", address, time.monotonic() - started) from error
        except (Busy, Dropped) as error:
            drops += 1
            await asyncio.sleep(pause_before_retry(error, drops, deadline))


def pause_before_retry(error: ControlError, drops: int, deadline: float) -> float:
    """Seconds to wait before dialling again after a drop; raises `error` if another dial is not worth it."""
    pause = random.uniform(0.005, 0.05)
    if (isinstance(error, Dropped) and drops > _MAX_DROPS) or time.monotonic() + pause > deadline:
        raise error
    return pause


async def _dial_once(host: str, port: int, handshake: DiallerHandshake, address: str) -> Connection:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Connection] = loop.create_future()
    result.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited

    def established(wire: _Wire, connection: Connection) -> None:
        if not result.done():
            result.set_result(connection)

    def ended(wire: _Wire, error: ControlError) -> None:
        if not result.done():
            result.set_exception(error)

    wire = _Wire(handshake, established, ended, address)
    try:
        await loop.create_connection(lambda: wire, host, port)
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
