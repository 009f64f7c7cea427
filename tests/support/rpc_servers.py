"""Serve remote calls from a thread, and make them from any thread, for tests without an event loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast.ft.control.event_loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer, dial_rpc

_SECONDS = 10.0


@contextlib.contextmanager
def rpc_server_thread(**options: Any) -> Iterator[AsyncRpcServer]:
    """An `AsyncRpcServer` with these options, listening on loopback in an event loop thread of its own."""
    server = AsyncRpcServer(**options)
    with contextlib.closing(LoopThread(f"holdfast-rpc-{options['identity']}")) as loop:
        loop.run(server.start(), _SECONDS)
        try:
            yield server
        finally:
            loop.run(server.close(), _SECONDS)


class RpcThread(contextlib.AbstractContextManager["RpcThread"]):
    """A connection to the server at `address`, in an event loop thread of its own."""

    def __init__(self, address: str, **options: Any) -> None:
        self._loop = LoopThread(f"holdfast-rpc-{options['identity']}")
        try:
            self._rpc = self._loop.run(dial_rpc(address, **options), _SECONDS)
        except BaseException:
            self._loop.close()
            raise

    def call(self, method: str, body: bytes = b"", timeout: float = 30.0) -> bytes:
        """As `RpcConnection.call`, from any thread."""
        return self._loop.run(self._rpc.call(method, body, timeout), timeout + _SECONDS)

    def close(self) -> None:
        """End the connection and the thread. Idempotent."""
        if self._loop.alive:
            self._loop.loop.call_soon_threadsafe(self._rpc.close)
            self._loop.run(self._rpc.wait_closed(), _SECONDS)
            self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()
