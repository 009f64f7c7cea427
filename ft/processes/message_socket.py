"""Typed msgspec messages between a process and a worker program that dials its Unix socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from holdfast.comms.system.paths import connect_unix
from holdfast.ft.processes.framed_socket import FramedSocket

T = TypeVar("T")


class MessageSocket(Generic[T]):
    """One end of a connection; `decoder` reads its messages. A context manager; see `FramedSocket` for threads."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._frames, self._decoder = FramedSocket(connection), decoder

    @classmethod
    def dial(cls, path: Path | str, decoder: msgspec.msgpack.Decoder[T]) -> MessageSocket[T]:
        """Connect to the process that listens at the Unix socket `path`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connect_unix(connection, path)
        return cls(connection, decoder)

    def fileno(self) -> int:
        """The descriptor, readable when there is something to `receive`; -1 once closed."""
        return self._frames.fileno()

    def send(self, message: T, timeout: float = 30.0) -> None:
        """Send one message. Raises `ChannelClosed`, or `TimeoutError` after `timeout` seconds without room."""
        self._frames.send(msgspec.msgpack.encode(message), timeout)

    def receive(self, timeout: float | None = None) -> T:
        """The next message. Raises `ChannelClosed` (an EOFError), or `TimeoutError` after `timeout` seconds."""
        return self._decoder.decode(self._frames.receive(timeout))

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._frames.close()

    def __enter__(self) -> MessageSocket[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
