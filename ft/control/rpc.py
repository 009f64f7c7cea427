"""Remote calls in asyncio. A connection is symmetric: once it is made, either side may call the other."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from holdfast.ft.control.channel import HANDSHAKE_SECONDS, MAX_PENDING, Listener, dial
from holdfast.ft.control.connection import Connection
from holdfast.ft.control.errors import CallTimeout, ControlError, FrameTooLarge, RemoteError
from holdfast.ft.control.frames import DEFAULT_LIMIT
from holdfast.ft.control.messages import Cancel, Failure, Notice, Reply, RpcRequest, decode, encode

Handler = Callable[[str, bytes], Awaitable[bytes] | bytes]
"""(peer's identity, body) -> body. Runs in the event loop; a handler that does not return at once must be async."""

_MESSAGE_CHARACTERS = 4000  # of a failed handler's error, at most

_log = logging.getLogger(__name__)


class RpcConnection:
    """Remote calls over one authenticated connection; belongs to one event loop.

    `peer` is the other side's identity, `lost` the error that ended the connection (None while it is open).
    """

    def __init__(self, connection: Connection, handlers: Mapping[str, Handler]) -> None:
        self.peer = connection.peer
        self._connection, self._handlers = connection, handlers
        self._calls: dict[int, tuple[str, asyncio.Future[bytes]]] = {}
        self._made = 0
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._notices: set[asyncio.Task[None]] = set()
        self._on_lost: list[Callable[[RpcConnection, ControlError], None]] = []
        connection.on_lost(self._ended)
        connection.on_message(self._take)

    @property
    def lost(self) -> ControlError | None:
        return self._connection.lost

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
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection.post(encode(RpcRequest(call, method, body)))
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
        self._connection.post(encode(Notice(method, body)))

    def close(self) -> None:
        """End the connection: pending calls fail, running handlers are cancelled. Idempotent."""
        self._connection.close()

    def abort(self) -> None:
        """Like `close`, without sending what is pending."""
        self._connection.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await self._connection.wait_closed()

    def _give_up(self, call: int) -> None:
        if self.lost is None:
            with contextlib.suppress(ControlError):
                self._connection.post(encode(Cancel(call)))

    def _take(self, payload: bytes) -> None:
        try:
            message = decode(payload)
        except ControlError as error:
            self._connection.drop(error)
            return
        match message:
            case RpcRequest():
                self._serve(message)
            case Notice():
                self._notice(message)
            case Cancel():
                task = self._serving.get(message.id)
                if task is not None:
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

    def _serve(self, request: RpcRequest) -> None:
        try:
            result = self._handler(request.method)(self.peer, request.body)
        except Exception as error:
            self._fail(request.id, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._serve_later(request.id, result))
            self._serving[request.id] = task
            task.add_done_callback(lambda _: self._serving.pop(request.id, None))
        else:
            self._reply(request.id, result)

    async def _serve_later(self, call: int, result: Awaitable[bytes]) -> None:
        try:
            body = await result
        except Exception as error:
            self._fail(call, error)
        else:
            self._reply(call, body)

    def _notice(self, notice: Notice) -> None:
        try:
            result = self._handler(notice.method)(self.peer, notice.body)
        except Exception:
            _log.exception("notice %s from %s failed", notice.method, self.peer)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._notice_later(notice.method, result))
            self._notices.add(task)
            task.add_done_callback(self._notices.discard)

    async def _notice_later(self, method: str, result: Awaitable[bytes]) -> None:
        try:
            await result
        except Exception:
            _log.exception("notice %s from %s failed", method, self.peer)

    def _handler(self, method: str) -> Handler:
        handler = self._handlers.get(method)
        if handler is None:
            raise LookupError(f"no handler for {method!r}")
        return handler

    def _reply(self, call: int, body: bytes) -> None:
        if self.lost is not None:
            return
        if not isinstance(body, bytes):
            self._fail(call, TypeError(f"the handler gave {type(body).__name__}, not bytes"))
            return
        try:
            self._connection.post(encode(Reply(call, body)))
        except FrameTooLarge as error:
            self._fail(call, error)
        except ControlError:
            pass  # the caller's own side of the connection reports the loss

    def _fail(self, call: int, error: Exception) -> None:
        if self.lost is None:
            with contextlib.suppress(ControlError):
                self._connection.post(encode(Failure(call, type(error).__name__, str(error)[:_MESSAGE_CHARACTERS])))

    def _ended(self, reason: ControlError) -> None:
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(reason)
        for task in [*self._serving.values(), *self._notices]:
            task.cancel()
        for receiver in self._on_lost:
            receiver(self, reason)
        self._on_lost.clear()


async def dial_rpc(
    address: str,
    *,
    key: bytes,
    job: str,
    identity: str,
    handlers: Mapping[str, Handler] | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = HANDSHAKE_SECONDS,
) -> RpcConnection:
    """Connect to an `AsyncRpcServer`; `handlers` serve its calls to this side. Raises what `dial` does."""
    connection = await dial(address, key=key, job=job, identity=identity, limit=limit, timeout=timeout)
    return RpcConnection(connection, handlers or {})


class AsyncRpcServer:
    """Serves remote calls in the running event loop.

    `on_connect` and `on_disconnect` are called in the loop for each connection. `connections` are the open ones:
    through them the server can call or notify its clients.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        identity: str,
        handlers: Mapping[str, Handler],
        on_connect: Callable[[RpcConnection], None] | None = None,
        on_disconnect: Callable[[RpcConnection, ControlError], None] | None = None,
        limit: int = DEFAULT_LIMIT,
        handshake_timeout: float = HANDSHAKE_SECONDS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.connections: set[RpcConnection] = set()
        self._handlers = handlers
        self._on_connect, self._on_disconnect = on_connect, on_disconnect
        self._listener = Listener(
            self._connected,
            key=key,
            job=job,
            identity=identity,
            limit=limit,
            handshake_timeout=handshake_timeout,
            max_pending=max_pending,
        )

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; `address` is known afterwards. Raises ValueError or OSError for an interface that cannot be used."""
        await self._listener.start(host, port)

    @property
    def address(self) -> str:
        """The "host:port" to dial; "" before `start`."""
        return self._listener.address

    @property
    def refused(self) -> int:
        """The number of connections that did not authenticate."""
        return self._listener.refused

    async def close(self) -> None:
        """Stop listening, end every connection and cancel its running handlers. Idempotent."""
        await self._listener.close()

    def _connected(self, connection: Connection) -> None:
        rpc = RpcConnection(connection, self._handlers)
        self.connections.add(rpc)
        rpc.on_lost(self._disconnected)
        if self._on_connect is not None:
            self._on_connect(rpc)

    def _disconnected(self, rpc: RpcConnection, reason: ControlError) -> None:
        self.connections.discard(rpc)
        if self._on_disconnect is not None:
            self._on_disconnect(rpc, reason)
