"""What the bench and its worker processes say to each other, and the private Unix socket on which they do.

A worker waits in a plain `recv`, so it burns no CPU while it is another library's turn.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from types import TracebackType

import msgspec

from holdfast.comms.system.paths import connect_unix

_LENGTH = struct.Struct("<I")
_LIMIT = 64 << 20


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready.

    `cpus` are those it may run on; `detail` names the library's version and transport.
    """

    key: str
    rank: int
    pid: int
    cpus: tuple[int, ...]
    detail: str


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Run an op: `singles` times alone, then `blocks` times `block` in a row; `c` elements in a block. `fresh`: each
    rank writes its input anew before each op, in the time that is taken.
    """

    op: str
    c: int
    dtype: str
    seed: int
    singles: int
    blocks: int
    block: int
    fresh: bool = False


class Measurement(msgspec.Struct, frozen=True, tag=True):
    """Entry and exit of each timing on CLOCK_MONOTONIC in ns, and how many elements came out wrong (None: unknown)."""

    singles: list[tuple[int, int]]
    blocks: list[tuple[int, int]]
    wrong: int | None


class MeasurementFailed(msgspec.Struct, frozen=True, tag=True):
    """The op raised."""

    text: str


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """Close and exit."""


Message = WorkerReady | Measure | Measurement | MeasurementFailed | StopWorker
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class BenchConnection:
    """One end of a connection.

    `receive` raises EOFError when the other side is gone, TimeoutError when it is silent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @staticmethod
    def dial(address: str) -> BenchConnection:
        """Connect to the bench listening at the Unix socket `address`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connect_unix(connection, address)
        return BenchConnection(connection)

    def send(self, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; waits at most `timeout` seconds for each part of it (None: until the other side ends)."""
        self._socket.settimeout(timeout)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _LIMIT:
            raise ValueError(f"a message of {length} bytes is beyond the limit of {_LIMIT}")
        return _decoder.decode(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError("the other side of the bench is gone")
            parts += part
        return bytes(parts)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def __enter__(self) -> BenchConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
