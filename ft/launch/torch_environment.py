"""The variables of torch's `env://` for each process of a job that is started on this host."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from types import TracebackType


class ReservedPort:
    """A port of this host for rank 0 to listen at, for as long as this context lasts. Raises OSError.

    `number` 0 takes a free one.
    """

    def __init__(self, host: str, number: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0 binds it beside this socket
            self._socket.bind((host, number))
        except BaseException:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class TorchEnvironment:
    """Of `size` ranks this host has `count`, from `first` on; rank 0 listens at `host`, an address, and `port`."""

    size: int
    count: int
    first: int
    host: str
    port: int

    def of(self, number: int) -> dict[str, str]:
        """The variables of this host's process `number`; none for spares, which are in no torch group."""
        if number >= self.count:
            return {}
        return {
            "RANK": str(self.first + number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }
