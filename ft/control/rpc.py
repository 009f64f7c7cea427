"""Remote calls over authenticated connections, in asyncio: `AsyncRpcServer` and `dial_rpc` give `RpcConnection`s.

A connection is symmetric: once it is made, either side may call the other. Addresses are "host:port". A server listens
on one interface (loopback unless said otherwise), never on all.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, cast

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import local_cause
from holdfast.ft.control.errors import (
    BadFrame,
    Busy,
    CallTimeout,
    ConnectionClosed,
    ConnectionLost,
    ControlError,
    Dropped,
    FrameTooLarge,
    RemoteError,
    cannot_connect,
)
from holdfast.ft.control.event_loop import BoundedListener, Departure
from holdfast.ft.control.frames import AuthenticatedSession, DiallerHandshake, ListenerHandshake, refusal
from holdfast.ft.listen_address import check_interface, join_address, split_address

Handler = Callable[[str, bytes], Awaitable[bytes] | bytes]
"""(peer's identity, body) -> body. Runs in the event loop; a handler that does not return at once must be async."""

CLOSED_THERE = "the other side closed it or died"
CLOSED_HERE = "closed on this side"

_LINGER = 1.0  # seconds that `close` waits for the peer to receive pending data
_SEND_LIMIT = 16 << 20  # bytes that are queued for a peer that does not read
_MESSAGE_CHARACTERS = 4000  # of a failed handler's error, at most

_log = logging.getLogger(__name__)

Number = Annotated[int, msgspec.Meta(ge=0)]


class RpcRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """A call; `id` is the caller's own count and comes back with the answer."""

    id: Number
    method: str
    body: bytes


class Reply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The answer to a call."""

    id: Number
    body: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """The reply to a call if its handler raised: the name of the error's type, and its message."""

    id: Number
    kind: str
    message: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The caller no longer waits for this call."""

    id: Number


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """A call without an answer."""

    method: str
    body: bytes


Message = RpcRequest | Reply | Failure | Cancel | Notice

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class RpcConnection:
    """Whole messages, in order, each once; belongs to one event loop.

    `peer` is the identity that the other side gave, having proved that it has the job's key. When the connection ends,
    `lost` is the reason: a `ConnectionLost`, or the `BadFrame` for which it was dropped.
    """

    def __init__(
        self, session: AuthenticatedSession, transport: asyncio.Transport, handlers: Mapping[str, Handler]
    ) -> None:
        self.peer = session.peer
        self.lost: ControlError | None = None
        self._session, self._transport, self._handlers = session, transport, handlers
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._linger: asyncio.TimerHandle | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[bytes]]] = {}
        self._made = 0
        self._serving: dict[object, asyncio.Task[None]] = {}
        """The handlers that run, by the number of their call; those of notices by any object."""
        self._on_lost: list[Callable[[RpcConnection, ControlError], None]] = []

    def on_lost(self, receiver: Callable[[RpcConnection, ControlError], None]) -> None:
        """Call `receiver` in the event loop, once, when the connection ends; at once if it has ended."""
        if self.lost is None:
            self._on_lost.append(receiver)
        else:
            receiver(self, self.lost)

    async def call(self, method: str, body: bytes = b"", timeout: float = 30.0) -> bytes:
        """The answer of the other side's handler.

        Raises `RemoteError` if the handler failed; `lost`, at once, when the connection is or gets lost; `CallTimeout`
        (an `OpTimeout`) after `timeout` seconds (the handler is then cancelled); `FrameTooLarge` if nothing was sent.
        """
        self._made += 1
        call, started = self._made, time.monotonic()
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._post(RpcRequest(call, method, body))
        self._calls[call] = (method, answer)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            self._give_up(call)
            raise CallTimeout(method, self.peer, time.monotonic() - started) from error
        except asyncio.CancelledError:
            self._give_up(call)
            raise
        finally:
            self._calls.pop(call, None)

    def notify(self, method: str, body: bytes = b"") -> None:
        """Call without waiting and without an answer. Raises `lost` if the connection is lost."""
        self._post(Notice(method, body))

    def close(self) -> None:
        """End the connection once what was given to it is sent: calls fail, handlers are cancelled. Idempotent."""
        if self._end(ConnectionClosed(self.peer, CLOSED_HERE)):
            self._transport.close()
            self._linger = self._loop.call_later(_LINGER, self._transport.abort)

    def abort(self) -> None:
        """Like `close`, without sending what is pending."""
        self._end(ConnectionClosed(self.peer, CLOSED_HERE))
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    # Called by the owner of the socket ----------------------------------------------------------------------------

    def take(self, data: bytes) -> None:
        """Handle bytes from the socket."""
        if self.lost is not None:
            return
        try:
            for payload in self._session.receive(data):
                self._take(payload)
        except ControlError as error:
            self._drop(error)

    def socket_closed(self, error: Exception | None) -> None:
        """The socket is closed; `error` if it was not closed in good order."""
        reason: ControlError
        try:
            self._session.end()
        except ControlError as truncated:
            reason = truncated
        else:
            reason = (
                ConnectionClosed(self.peer, CLOSED_THERE)
                if error is None
                else ConnectionLost(self.peer, f"{CLOSED_THERE} ({error})")
            )
        self._drop(reason)
        if self._linger is not None:
            self._linger.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    # Messages -----------------------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        """Send without waiting for a slow peer; one that leaves 16 MiB unread is given up. Raises `lost`."""
        if self.lost is not None:
            raise self.lost.again()
        self._transport.write(self._session.seal(_encode(message)))
        if self._transport.get_write_buffer_size() > _SEND_LIMIT:
            reason = ConnectionLost(self.peer, "it does not read what is sent to it")
            self._drop(reason)
            raise reason.again()

    def _give_up(self, call: int) -> None:
        with contextlib.suppress(ControlError):
            self._post(Cancel(call))

    def _take(self, payload: bytes) -> None:
        try:
            message = _decoder.decode(payload)
        except UNDECODABLE as error:
            raise BadFrame(f"not a remote-call message: {error}") from error
        match message:
            case RpcRequest(call, method, body):
                self._serve(method, body, call)
            case Notice(method, body):
                self._serve(method, body, None)
            case Cancel(call):
                if (task := self._serving.get(call)) is not None:
                    task.cancel()
            case Reply() | Failure():
                self._answered(message)

    def _answered(self, message: Reply | Failure) -> None:
        method, answer = self._calls.get(message.id, ("", None))
        if answer is None or answer.done():
            return
        if isinstance(message, Reply):
            answer.set_result(message.body)
        else:
            answer.set_exception(RemoteError(self.peer, method, message.kind, message.message))

    def _serve(self, method: str, body: bytes, call: int | None) -> None:
        """Run the handler of a call, or of a notice (`call` is None)."""
        try:
            if (handler := self._handlers.get(method)) is None:
                raise LookupError(f"no handler for {method!r}")
            result = handler(self.peer, body)
        except Exception as error:
            self._fail(method, call, error)
            return
        if not inspect.isawaitable(result):
            self._reply(method, call, result)
            return
        key = object() if call is None else call
        self._serving[key] = task = asyncio.ensure_future(self._serve_later(method, result, call))
        task.add_done_callback(lambda _: self._serving.pop(key, None))

    async def _serve_later(self, method: str, result: Awaitable[bytes], call: int | None) -> None:
        try:
            body = await result
        except Exception as error:
            self._fail(method, call, error)
        else:
            self._reply(method, call, body)

    def _reply(self, method: str, call: int | None, body: bytes) -> None:
        if call is None:
            return
        if not isinstance(body, bytes):
            self._fail(method, call, TypeError(f"the handler gave {type(body).__name__}, not bytes"))
            return
        try:
            self._post(Reply(call, body))
        except FrameTooLarge as error:
            self._fail(method, call, error)
        except ControlError:
            pass  # the caller's own side of the connection reports the loss

    def _fail(self, method: str, call: int | None, error: Exception) -> None:
        if call is None:
            _log.error("notice %s from %s failed", method, self.peer, exc_info=error)
            return
        with contextlib.suppress(ControlError):
            self._post(Failure(call, type(error).__name__, str(error)[:_MESSAGE_CHARACTERS]))

    def _drop(self, reason: ControlError) -> None:
        """End the connection at once. Idempotent."""
        if self._end(reason):
            self._transport.abort()

    def _end(self, reason: ControlError) -> bool:
        """Fail what waits and tell of the end; False if it had ended. The caller closes the socket."""
        if self.lost is not None:
            return False
        self.lost = reason
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(reason)
        for task in list(self._serving.values()):
            task.cancel()
        receivers, self._on_lost = self._on_lost, []
        for receiver in receivers:
            receiver(self, reason)
        return True


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
