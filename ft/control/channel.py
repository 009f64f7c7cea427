"""Authenticated connections over TCP, in asyncio: `listen`, `dial`, and the `Connection` that both give.

Addresses are "host:port". A listener binds to one interface (loopback unless said otherwise), never to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

from holdfast.comms.errors import OpTimeout
from holdfast.ft.control.errors import Busy, ConnectionLost, ControlError
from holdfast.ft.control.frames import DEFAULT_LIMIT, DiallerHandshake, ListenerHandshake, Session, refusal

HANDSHAKE_SECONDS = 5.0
MAX_PENDING = 256
"""Unauthenticated connections that a listener holds at most; when another comes, the oldest is turned away.
"""

_RECEIVE_HIGH, _RECEIVE_LOW = (
    1024,
    256,
)  # messages that wait for `recv` before the sender is held back, and until
_SEND_LIMIT = 16 << 20  # bytes that `post` lets pile up for a peer that does not read
_CLOSED_THERE = "the other side closed it or died"
_CLOSED_HERE = "closed on this side"


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


class Connection:
    """An authenticated connection: whole messages, in order, each once. Belongs to one event loop.

    `peer` is the identity that the other side gave, having proved that it has the job's key. When the
    connection ends, `lost` says why: a `ConnectionLost`, or the `BadFrame` for which it was dropped; every
    method raises it.
    """

    def __init__(self, session: Session, transport: asyncio.Transport) -> None:
        self.peer = session.peer
        self.lost: ControlError | None = None
        self._session, self._transport = session, transport
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._on_message: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[ControlError], None] | None = None
        self._paused = False

    def post(self, payload: bytes) -> None:
        """Send without waiting for a slow peer; one that leaves 16 MiB unread is given up. May raise
        `FrameTooLarge`.
        """
        self._check()
        self._transport.write(self._session.seal(payload))
        if self._transport.get_write_buffer_size() > _SEND_LIMIT:
            self._end(ConnectionLost(self.peer, "it does not read what is sent to it"))
            self._check()

    async def send(self, payload: bytes) -> None:
        """Send, waiting while the peer is slow. May raise `FrameTooLarge`."""
        while self._writable is not None and self.lost is None:
            await asyncio.shield(self._writable)
        self.post(payload)

    async def recv(self) -> bytes:
        """The next message; messages from before the end are still given out. One task at a time may wait."""
        while not self._messages:
            self._check()
            if self._arrived is not None:
                raise RuntimeError("two tasks wait for messages on one connection")
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        message = self._messages.popleft()
        if self._paused and len(self._messages) <= _RECEIVE_LOW and self.lost is None:
            self._paused = False
            self._transport.resume_reading()
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Messages until either side closes; any other end raises."""
        while True:
            try:
                message = await self.recv()
            except ConnectionLost as error:
                if error.evidence in (_CLOSED_HERE, _CLOSED_THERE):
                    return
                raise
            yield message

    def on_message(self, receiver: Callable[[bytes], None]) -> None:
        """Give messages to `receiver` as they arrive, in the event loop, instead of keeping them for `recv`."""
        self._on_message = receiver
        while self._messages:
            receiver(self._messages.popleft())

    def on_lost(self, receiver: Callable[[ControlError], None]) -> None:
        """Call `receiver` once, in the event loop, when the connection ends; at once if it has."""
        self._on_lost = receiver
        if self.lost is not None:
            receiver(self.lost)

    def close(self) -> None:
        """End the connection once what was given to it is sent. Idempotent."""
        self._end(ConnectionLost(self.peer, _CLOSED_HERE), flush=True)

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._end(ConnectionLost(self.peer, _CLOSED_HERE))
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def _take(self, data: bytes) -> None:
        if self.lost is not None:
            return
        try:
            messages = self._session.receive(data)
        except ControlError as error:
            self._end(error)
            return
        if self._on_message is not None:
            for message in messages:
                self._on_message(message)
            return
        self._messages.extend(messages)
        self._wake_receiver()
        if len(self._messages) > _RECEIVE_HIGH and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _wake_receiver(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _hold_writing(self, hold: bool) -> None:
        if hold:
            self._writable = self._loop.create_future()
        elif self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def _end(self, reason: ControlError, *, flush: bool = False) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        if flush:
            self._transport.close()
        else:
            self._transport.abort()
        self._hold_writing(False)
        self._wake_receiver()
        if self._on_lost is not None:
            self._on_lost(reason)

    def _socket_closed(self, error: Exception | None) -> None:
        reason: ControlError | None = None
        try:
            self._session.end()
        except ControlError as truncated:
            reason = truncated
        self._end(reason or ConnectionLost(self.peer, f"{_CLOSED_THERE}{f' ({error})' if error else ''}"))
        if not self._closed.done():
            self._closed.set_result(None)


class _Wire(asyncio.Protocol):
    """One socket, from the first byte of the handshake on."""

    def __init__(
        self,
        handshake: DiallerHandshake | ListenerHandshake,
        established: Callable[[_Wire, Connection], None],
        ended: Callable[[_Wire, ControlError], None],
        address: str,
    ) -> None:
        self._handshake, self._established, self._ended = handshake, established, ended
        self._address = address
        self.connection: Connection | None = None
        self.transport: asyncio.Transport | None = None
        self.failed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.failed:
            self.transport.abort()
            return
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(self._handshake, DiallerHandshake):
            self.transport.write(self._handshake.hello())

    def data_received(self, data: bytes) -> None:
        if self.connection is not None:
            self.connection._take(data)
        elif not self.failed and self.transport is not None:
            try:
                self.transport.write(self._handshake.receive(data))
            except ControlError as error:
                self.fail(error, getattr(self._handshake, "farewell", b""))
                return
            if self._handshake.session is not None:
                self.connection = Connection(self._handshake.session, self.transport)
                self._established(self, self.connection)
                self.connection._take(b"")

    def fail(self, error: ControlError, farewell: bytes = b"") -> None:
        """Give up the handshake."""
        if self.failed or self.connection is not None:
            return
        self.failed = True
        if self.transport is not None:
            self.transport.write(farewell)
            self.transport.close()
        self._ended(self, error)

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection._hold_writing(True)

    def resume_writing(self) -> None:
        if self.connection is not None:
            self.connection._hold_writing(False)

    def connection_lost(self, error: Exception | None) -> None:
        if self.connection is not None:
            self.connection._socket_closed(error)
            self._ended(self, self.connection.lost or ConnectionLost(self._address, _CLOSED_THERE))
        else:
            self.fail(_Dropped(self._address, f"{_CLOSED_THERE} during the handshake"))


class Listener:
    """Where others dial in. `address` is "host:port"; `refused` counts connections that did not authenticate."""

    def __init__(
        self,
        on_connection: Callable[[Connection], None],
        *,
        key: bytes,
        job: str,
        identity: str,
        limit: int,
        handshake_timeout: float,
        max_pending: int,
    ) -> None:
        ListenerHandshake(key, job, identity, limit)  # says at once what is wrong with the arguments
        self.address = ""
        self.refused = 0
        self._on_connection = on_connection
        self._key, self._job, self._identity, self._limit = key, job, identity, limit
        self._timeout, self._max_pending = handshake_timeout, max_pending
        self._pending: dict[_Wire, asyncio.TimerHandle] = {}
        self._open: set[_Wire] = set()
        self._server: asyncio.Server | None = None

    async def _start(self, host: str, port: int) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, port, backlog=512)
        bound = self._server.sockets[0].getsockname()
        self.address = join_address(bound[0], bound[1])

    def _accept(self) -> _Wire:
        if len(self._pending) >= self._max_pending:
            oldest = next(iter(self._pending))
            oldest.fail(Busy("turned away for newer connections"), refusal("busy"))
        handshake = ListenerHandshake(self._key, self._job, self._identity, self._limit)
        wire = _Wire(handshake, self._established, self._ended, self.address)
        late = ConnectionLost("a dialler", f"did not authenticate within {self._timeout:g} s")
        self._pending[wire] = asyncio.get_running_loop().call_later(self._timeout, wire.fail, late)
        return wire

    def _established(self, wire: _Wire, connection: Connection) -> None:
        self._pending.pop(wire).cancel()
        self._open.add(wire)
        self._on_connection(connection)

    def _ended(self, wire: _Wire, error: ControlError) -> None:
        timer = self._pending.pop(wire, None)
        if timer is not None:
            timer.cancel()
            self.refused += 1
        self._open.discard(wire)

    async def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for wire in list(self._pending):
            wire.fail(ConnectionLost("a dialler", _CLOSED_HERE))
        connections = [wire.connection for wire in self._open if wire.connection is not None]
        for connection in connections:
            connection.close()
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.wait_closed(), 0.5)
            connection.abort()


def _check_interface(host: str) -> None:
    unspecified = not host
    with contextlib.suppress(ValueError):
        unspecified = unspecified or ipaddress.ip_address(host).is_unspecified
    if unspecified:
        raise ValueError(f"host {host!r} means every interface; name the one to listen on")


async def listen(
    on_connection: Callable[[Connection], None],
    *,
    key: bytes,
    job: str,
    identity: str,
    host: str = "127.0.0.1",
    port: int = 0,
    limit: int = DEFAULT_LIMIT,
    handshake_timeout: float = HANDSHAKE_SECONDS,
    max_pending: int = MAX_PENDING,
) -> Listener:
    """Listen on one interface; port 0 takes a free one. `on_connection` gets each authenticated connection.

    Who fails the handshake, or is slower than `handshake_timeout` seconds, is turned away without a trace but
    in `Listener.refused`. Raises ValueError for a host that means all interfaces, OSError if it cannot be
    bound.
    """
    _check_interface(host)
    listener = Listener(
        on_connection,
        key=key,
        job=job,
        identity=identity,
        limit=limit,
        handshake_timeout=handshake_timeout,
        max_pending=max_pending,
    )
    await listener._start(host, port)
    return listener


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

    `WrongKey`, `WrongJob`, `UnknownVersion` or another `BadFrame` if the listener is not one of this job (it
    then has learnt nothing but our identity); `ConnectionLost` if nobody listens; `Busy` if it was turned
    away for others until the end; `OpTimeout` if nothing answered; ValueError for an address that is none.
    """
    host, port = split_address(address)
    started = time.monotonic()
    drops = 0
    while True:
        try:
            async with asyncio.timeout(max(0.0, started + timeout - time.monotonic())):
                return await _dial_once(host, port, DiallerHandshake(key, job, identity, limit), address)
        except TimeoutError as error:
            raise OpTimeout(f"dial {address}", 0, time.monotonic() - started) from error
        except (Busy, _Dropped) as error:
            drops += 1
            pause = random.uniform(0.005, 0.05)
            if (isinstance(error, _Dropped) and drops > 5) or time.monotonic() + pause > started + timeout:
                raise
            await asyncio.sleep(pause)


class _Dropped(ConnectionLost):
    """The listener closed the connection during the handshake, without a word: under a flood it may have to."""


async def _dial_once(host: str, port: int, handshake: DiallerHandshake, address: str) -> Connection:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Connection] = loop.create_future()

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
        raise ConnectionLost(address, f"cannot connect: {error.strerror or error}") from error
    except asyncio.CancelledError:
        if wire.transport is not None:
            wire.transport.abort()
        raise
