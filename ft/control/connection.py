"""Remote calls over one authenticated connection. It is symmetric: once it is made, either side may call the other."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import msgspec

from holdfast.ft.control.errors import (
    BadFrame,
    CallTimeout,
    ConnectionClosed,
    ConnectionLost,
    ControlError,
    FrameTooLarge,
    RemoteError,
)
from holdfast.ft.control.frames import AuthenticatedSession

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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
