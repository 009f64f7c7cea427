"""Find the sockets of a gloo group: to shut them down is the only way to end a blocked op."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import re
import select
import socket
import stat
import struct
import termios
from collections.abc import Sequence
from typing import Any

from holdfast.comms.system.descriptors import OwnedDescriptor

_BPF_RETURN = 0x06  # BPF_RET | BPF_K
_SO_ATTACH_FILTER = 26
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def sockets() -> set[tuple[int, int]]:
    """The sockets of this process, as (descriptor, inode)."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208  # a tenth of the time that pathlib takes
        try:
            status = os.fstat(int(entry))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(entry), status.st_ino))
    return found


def find_sockets(
    published: Sequence[bytes], fetched: Sequence[bytes]
) -> tuple[list[OwnedDescriptor], list[OwnedDescriptor]]:
    """Duplicates of a group's listeners, and of its connections, by the addresses that gloo itself published.

    A group listens at ports of its own, and other threads may open sockets at the same time: a listener is the group's
    if its address is in `published`, a connection if it was accepted there, or goes to an address in `fetched`.
    """
    listeners, connections = [], []
    for number, inode in sockets():
        try:
            each = socket.socket(fileno=os.dup(number))
        except OSError:
            continue  # closed since
        try:
            if os.fstat(each.fileno()).st_ino != inode or each.family not in _INTERNET:
                continue
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if _is_named(each, each.getsockname(), published):
                    listeners.append(OwnedDescriptor(os.dup(each.fileno())))
            elif _is_named(each, each.getsockname(), published) or _is_named(each, each.getpeername(), fetched):
                connections.append(OwnedDescriptor(os.dup(each.fileno())))
        except OSError:
            pass  # not connected
        finally:
            each.close()
    return listeners, connections


def _is_named(each: socket.socket, address: tuple[Any, ...], texts: Sequence[bytes]) -> bool:
    """Whether one of `texts`, which hold a `struct sockaddr` among other bytes, names an address."""
    start = struct.pack("=H", each.family) + struct.pack(">H", address[1])
    host = socket.inet_pton(each.family, address[0].partition("%")[0])
    host_at = 4 if each.family == socket.AF_INET else 8
    return any(
        text[found.start() + host_at :].startswith(host)
        for text in texts
        for found in re.finditer(re.escape(start), text, re.DOTALL)
    )


def refuse_connections(listener: OwnedDescriptor) -> None:
    """Make a listening socket refuse further connections; accepted ones stay.

    A socket filter makes the kernel drop all that arrives. The socket cannot be closed: gloo's own loop still uses it.
    """
    accept_nothing = struct.pack("HBBI", _BPF_RETURN, 0, 0, 0)
    program = ctypes.create_string_buffer(accept_nothing)
    with contextlib.closing(socket.socket(fileno=os.dup(listener))) as each:
        filters = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def are_lost(connections: Sequence[OwnedDescriptor]) -> bool:
    """Whether the peers of all connections have closed them, and nothing that they have sent is left to read."""
    poll, unread = select.poll(), array.array("i", [0])
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    if not connections or len(poll.poll(0)) < len(connections):
        return False
    for connection in connections:
        with contextlib.suppress(OSError):
            fcntl.ioctl(connection, termios.FIONREAD, unread)
            if unread[0]:
                return False
    return True


def shut_down(connection: OwnedDescriptor) -> None:
    """End a connection, which ends the ops that use it, unless the number names another socket by now."""
    with contextlib.suppress(OSError):
        if connection.ours:
            with contextlib.closing(socket.socket(fileno=os.dup(connection))) as each:
                each.shutdown(socket.SHUT_RDWR)
