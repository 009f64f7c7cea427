"""Reads and writes of file descriptors that continue after a short result.

The kernel moves at most 0x7ffff000 bytes in one call, and fewer when a signal comes, or when a pipe or a disk is nearly
full. That is neither an error nor the end of the file. `at_once` limits the bytes of one call; tests lower it.
"""

from __future__ import annotations

import os

AT_ONCE = 1 << 30


def read_all(fd: int, at_once: int = 1 << 16) -> bytes:
    """Read all bytes from a descriptor's current position to its end."""
    parts = []
    while part := os.read(fd, at_once):
        parts.append(part)
    return b"".join(parts)


def read_at(fd: int, nbytes: int, offset: int, at_once: int = AT_ONCE) -> bytes:
    """Read `nbytes` from an offset of a file; fewer only where the file ends."""
    parts: list[bytes] = []
    end = offset + nbytes
    while offset < end and (part := os.pread(fd, min(at_once, end - offset), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes, at_once: int = AT_ONCE) -> None:
    """Write all of `data` at a descriptor's current position."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:at_once]) :]
