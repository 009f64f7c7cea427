"""The variables of torch's `env://` for each process of a job that is started on this machine."""

from __future__ import annotations

import socket
from types import TracebackType

HOST = "127.0.0.1"


class TorchEnvironment:
    """Reserves a port for rank 0 to listen at, for as long as this context lasts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 binds it beside this socket
        self._port.bind((HOST, 0))

    def of(self, number: int) -> dict[str, str]:
        """The variables of process `number`; none for spares, which are in no torch group."""
        if number >= self._size:
            return {}
        rank, size = str(number), str(self._size)
        return {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port.getsockname()[1]),
        }

    def __enter__(self) -> TorchEnvironment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._port.close()
