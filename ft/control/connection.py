"""An authenticated connection in asyncio, from the end of the handshake on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from holdfast.ft.control.errors import ConnectionClosed, ConnectionLost, ControlError
from holdfast.ft.control.frames import AuthenticatedSession

CLOSED_THERE = "the other side closed it or died"
CLOSED_HERE = "closed on this side"

_RECEIVE_HIGH, _RECEIVE_LOW = 1024, 256  # queued messages at which reading pauses, and resumes
_LINGER = 1.0  # seconds that `close` waits for the peer to receive pending data
_SEND_LIMIT = 16 << 20  # bytes that `post` queues for a peer that does not read


class Connection:
    """An authenticated connection: whole messages, in order, each once. Belongs to one event loop.

    `peer` is the identity that the other side gave, having proved that it has the job's key. When the connection ends,
    `lost` is the reason: a `ConnectionLost`, or the `BadFrame` for which it was dropped; every method raises it.
    """

    def __init__(self, session: AuthenticatedSession, transport: asyncio.Transport) -> None:
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
        self._linger: asyncio.TimerHandle | None = None

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
        if len(self._messages) <= _RECEIVE_LOW:
            self._resume()
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Messages until either side closes; any other end raises."""
        while True:
            try:
                message = await self.recv()
            except ConnectionClosed:
                return
            yield message

    def on_message(self, receiver: Callable[[bytes], None]) -> None:
        """Give messages to `receiver` as they arrive, in the event loop, instead of keeping them."""
        self._on_message = receiver
        while self._messages:
            receiver(self._messages.popleft())
        self._resume()

    def on_lost(self, receiver: Callable[[ControlError], None]) -> None:
        """Call `receiver` once, in the event loop, when the connection ends; at once if it has."""
        self._on_lost = receiver
        if self.lost is not None:
            receiver(self.lost)

    def close(self) -> None:
        """End the connection once what was given to it is sent. Idempotent."""
        self._end(ConnectionClosed(self.peer, CLOSED_HERE), flush=True)

    def drop(self, reason: ControlError) -> None:
        """End the connection at once because of what the other side sent. Idempotent."""
        self._end(reason)

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self._end(ConnectionClosed(self.peer, CLOSED_HERE))
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._closed)

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost.again()

    def take(self, data: bytes) -> None:
        """Handle bytes from the socket."""
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

    def _resume(self) -> None:
        if self._paused and self.lost is None:
            self._paused = False
            self._transport.resume_reading()

    def _wake_receiver(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def hold_writing(self, hold: bool) -> None:
        """Hold back senders while the socket's buffer is full."""
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
            self._linger = self._loop.call_later(_LINGER, self._transport.abort)
        else:
            self._transport.abort()
        self.hold_writing(False)
        self._wake_receiver()
        if self._on_lost is not None:
            self._on_lost(reason)

    def socket_closed(self, error: Exception | None) -> None:
        """The socket is closed; `error` if it was not closed in good order."""
        reason: ControlError | None = None
        try:
            self._session.end()
        except ControlError as truncated:
            reason = truncated
        if reason is None and error is None:
            reason = ConnectionClosed(self.peer, CLOSED_THERE)
        self._end(reason or ConnectionLost(self.peer, f"{CLOSED_THERE} ({error})"))
        if self._linger is not None:
            self._linger.cancel()
        if not self._closed.done():
            self._closed.set_result(None)
