"""Remote calls between the processes of a job: names to import, and the server that runs in a thread of its
own.

In an event loop: `AsyncRpcServer`, `dial_rpc` -> `RpcConnection`. From ordinary threads: `RpcServer`,
`RpcClient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.comms.system import forks
from holdfast.ft.control.calls import AsyncRpcServer, Handler, RpcConnection, dial_rpc
from holdfast.ft.control.client import RpcClient
from holdfast.ft.control.errors import CallTimeout, ConnectionLost, ControlError, RemoteError
from holdfast.ft.control.frames import DEFAULT_LIMIT
from holdfast.ft.control.loop import LoopThread

__all__ = [
    "AsyncRpcServer",
    "CallTimeout",
    "ConnectionLost",
    "ControlError",
    "Handler",
    "RemoteError",
    "RpcClient",
    "RpcConnection",
    "RpcServer",
    "dial_rpc",
]

_START_SECONDS = 10.0


class RpcServer:
    """Serves remote calls from a thread of its own, named `holdfast-rpc-<identity>`.

    Handlers run in that thread's event loop: one that does not return at once must be async, and may then
    wait as long as it likes without holding up others. `on_disconnect(peer)` is called there whenever a
    client is lost.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        identity: str,
        handlers: Mapping[str, Handler],
        host: str = "127.0.0.1",
        port: int = 0,
        on_connect: Callable[[str], None] | None = None,
        on_disconnect: Callable[[str], None] | None = None,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        self._identity, self._host, self._port = identity, host, port
        self._server = AsyncRpcServer(
            key=key,
            job=job,
            identity=identity,
            handlers=handlers,
            on_connect=(lambda rpc: on_connect(rpc.peer)) if on_connect is not None else None,
            on_disconnect=(lambda rpc, reason: on_disconnect(rpc.peer)) if on_disconnect is not None else None,
            limit=limit,
        )
        self._thread: LoopThread | None = None
        forks.own(self, f"the server {identity}", ("address",))

    def start(self) -> None:
        """Listen. Raises ValueError or OSError, leaving nothing behind, for an interface that will not do."""
        if self._thread is not None:
            raise RuntimeError("the server is started already")
        self._thread = LoopThread(f"holdfast-rpc-{self._identity}")
        try:
            self._thread.run(self._server.start(self._host, self._port), _START_SECONDS)
        except BaseException:
            self._thread.close()
            raise

    @property
    def address(self) -> str:
        """The "host:port" to dial; "" before `start`."""
        return self._server.address

    def close(self) -> None:
        """End every connection, cancel running handlers, and join the thread. Idempotent."""
        if self._thread is not None and self._thread.alive:
            self._thread.run(self._server.close(), _START_SECONDS)
            self._thread.close()

    def __enter__(self) -> RpcServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
