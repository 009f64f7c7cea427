"""The HTTP server of metrics: one page, a bounded number of connections, one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from holdfast.ft.control.bounded_listener import BoundedListener, Departure
from holdfast.ft.control.loop import LoopThread

MOST = 16
"""The most connections at a time; one more ends the oldest."""
SECONDS = 5.0
"""Seconds that a connection may take to send its request and to read the answer."""
_REQUEST_BYTES = 16 << 10
_START_SECONDS = 30.0


class MetricsServer:
    """Serves `page()` (its content type and bytes) at /metrics of one interface, from construction to `close`.

    Raises OSError if it cannot listen there.
    """

    def __init__(self, host: str, port: int, page: Callable[[], tuple[str, bytes]]) -> None:
        self._page = page
        self._thread = LoopThread("holdfast-metrics")
        try:
            self.port = self._thread.run(self._start(host, port), _START_SECONDS)
        except BaseException:
            self._thread.close()
            raise

    async def _start(self, host: str, port: int) -> int:
        self._listener = BoundedListener(self._make, most=MOST, seconds=SECONDS)
        return (await self._listener.start(host, port))[1]

    def _make(self) -> _Request:
        return _Request(self._page, self._listener)

    async def _stop(self) -> None:
        self._listener.close()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.alive:
            self._thread.run(self._stop(), _START_SECONDS)
            self._thread.close()


class _Request(asyncio.Protocol):
    """One connection: one request, one answer."""

    def __init__(self, page: Callable[[], tuple[str, bytes]], listener: BoundedListener) -> None:
        self._page, self._listener = page, listener
        self._asked = bytearray()
        self._transport: asyncio.Transport | None = None
        self._gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._gone:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._asked += data
        if b"\r\n\r\n" in self._asked or len(self._asked) > _REQUEST_BYTES:
            self._answer()

    def _answer(self) -> None:
        assert self._transport is not None
        words = bytes(self._asked.partition(b"\r\n")[0]).split()
        kind, body = "text/plain; charset=utf-8", b"only GET /metrics is served here\n"
        status = "404 Not Found"
        if len(words) == 3 and words[0] in (b"GET", b"HEAD") and words[1].partition(b"?")[0] in (b"/", b"/metrics"):
            status, (kind, body) = "200 OK", self._page()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._transport.write(head.encode() + (b"" if words[:1] == [b"HEAD"] else body))
        self._transport.close()

    def turn_away(self, why: Departure) -> None:
        self._gone = True
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.admit(self)
