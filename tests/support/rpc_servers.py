"""Serve remote calls from a thread, for tests that call from others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from holdfast.ft.control.loop import LoopThread
from holdfast.ft.control.rpc import AsyncRpcServer

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
