"""A heartbeat in shared memory: a page that its process writes and the other processes of its host read.

The page is a memfd that the others open through /proc, so it has no name and ends with its process. It holds the time
at which its process last ran, and its position in its ops; both can be read while the process is stopped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.system.mappings import map_file
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import start_time

_BYTES = mmap.PAGESIZE
_PAGE = struct.Struct("<8sQdQQ?")  # magic, version, time of the beat, epoch, ops entered, inside
_MAGIC = b"HFPULSE1"
_VERSION = struct.Struct("<Q")
_AT = 8
_TRIES = 8
_NAME = "holdfast-pulse"


@dataclass(frozen=True, slots=True)
class OpPosition:
    """The number of ops that a process has entered in `epoch`, and whether it is `inside` of the last one."""

    epoch: int
    entered: int
    inside: bool


class HeartbeatPage:
    """The page of this process. Others need `number` to open it."""

    def __init__(self) -> None:
        self.fd = OwnedDescriptor(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        os.ftruncate(self.fd, _BYTES)
        self._page = map_file(self.fd, _BYTES)
        self._version = 0
        self.number = int(self.fd)

    def beat(self, now: float, place: OpPosition) -> None:
        """Record that this process runs. The version is odd while the rest is being written."""
        self._version += 2
        _VERSION.pack_into(self._page, _AT, self._version - 1)
        _PAGE.pack_into(self._page, 0, _MAGIC, self._version - 1, now, place.epoch, place.entered, place.inside)
        _VERSION.pack_into(self._page, _AT, self._version)

    def close(self) -> None:
        self._page.release()
        self.fd.close()


class HeartbeatPageReader:
    """The page of another process."""

    def __init__(self, peer: Peer, fd: int) -> None:
        """Raises OSError if there is no such page, or this process may not read it."""
        path = f"/proc/{peer.pid}/fd/{fd}"
        _check_name(path)  # first: opening another file, such as a FIFO without a writer, could block for ever
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _check_name(f"/proc/self/fd/{opened}")
            if start_time(peer.pid) != peer.started:
                raise FileNotFoundError(path)
            self._page = map_file(opened, _BYTES, writable=False)
        except (ValueError, ProcessLookupError) as error:
            raise FileNotFoundError(path) from error
        finally:
            os.close(opened)

    def read(self) -> tuple[float, OpPosition] | None:
        """The time at which the process last beat, and its position; None if it never has."""
        for _ in range(_TRIES):
            magic, version, time, epoch, entered, inside = _PAGE.unpack_from(self._page, 0)
            if magic == _MAGIC and version % 2 == 0 and _VERSION.unpack_from(self._page, _AT)[0] == version:
                return time, OpPosition(epoch, entered, inside)
        return None

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._page.release()


def _check_name(path: str) -> None:
    """Raise OSError if `path` is not a heartbeat page."""
    if str(Path(path).readlink()) != f"/memfd:{_NAME} (deleted)":
        raise FileNotFoundError(path)
