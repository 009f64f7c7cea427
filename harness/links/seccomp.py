"""A seccomp filter that hands `connect`, `listen` and `getpeername` of a process to another process.

See seccomp_unotify(2). No privilege is needed: `install` sets no_new_privs. All other system calls pass at the cost of
a lookup in a bitmap. The filter cannot be removed; it ends with the process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from dataclasses import dataclass
from typing import Final

from holdfast.comms.errors import Unsupported

_libc: Final = ctypes.CDLL(None, use_errno=True)

_PR_SET_NO_NEW_PRIVS, _PR_SET_PTRACER = 38, 0x59616D61
_SET_MODE_FILTER = 1
_NEW_LISTENER, _SPEC_ALLOW, _WAIT_KILLABLE = 1 << 3, 1 << 2, 1 << 5
_CONTINUE = 1
_RECV, _SEND = 0xC0502100, 0xC0182101
_ALLOW, _USER_NOTIF = 0x7FFF0000, 0x7FC00000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PIDFD_GETFD = 438


@dataclass(frozen=True, slots=True)
class SyscallNumbers:
    """The system call numbers of a processor architecture."""

    audit: int
    seccomp: int
    connect: int
    listen: int
    getpeername: int


_MACHINES = {
    "x86_64": SyscallNumbers(audit=0xC000003E, seccomp=317, connect=42, listen=50, getpeername=52),
    "aarch64": SyscallNumbers(audit=0xC00000B7, seccomp=277, connect=203, listen=201, getpeername=205),
}


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class Syscall:
    """One of the three system calls, with its arguments; thread `thread` waits for an answer."""

    id: int
    thread: int
    number: int
    arguments: tuple[int, ...]


def machine() -> SyscallNumbers:
    """The numbers for this processor. Raises `Unsupported` for an unknown one."""
    found = _MACHINES.get(platform.machine())
    if found is None:
        raise Unsupported(f"breaking links on {platform.machine()}", f"it is done on {', '.join(_MACHINES)}")
    return found


def _instruction(code: int, value: int, equal: int = 0, other: int = 0) -> bytes:
    return struct.pack("HBBI", code, equal, other, value)


def _filter(numbers: SyscallNumbers) -> bytes:
    trapped = (numbers.connect, numbers.listen, numbers.getpeername)
    parts = [
        _instruction(_LOAD, 4),
        _instruction(_JUMP_EQUAL, numbers.audit, 1, 0),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, 0),
        *(_instruction(_JUMP_EQUAL, number, len(trapped) - place, 0) for place, number in enumerate(trapped)),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _USER_NOTIF),
    ]
    return b"".join(parts)


def install(supervisor: int) -> int:
    """Hand the three calls of this thread, and of all that it starts, to the holder of the returned descriptor.

    The process `supervisor` may read this one's memory. Raises `Unsupported` where the kernel refuses.
    """
    numbers = machine()
    program = ctypes.create_string_buffer(_filter(numbers))
    described = _FilterProgram((len(program) - 1) // 8, ctypes.addressof(program))
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(supervisor), 0, 0, 0)
    flags = _NEW_LISTENER | _SPEC_ALLOW
    for more in (_WAIT_KILLABLE, 0):
        fd = int(_libc.syscall(numbers.seccomp, _SET_MODE_FILTER, flags | more, ctypes.byref(described)))
        if fd >= 0:
            os.set_inheritable(fd, False)
            return fd
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            break
    raise Unsupported(
        f"breaking links on this kernel: seccomp says {os.strerror(number)}",
        "it needs Linux 5.6, and a container profile that allows seccomp and pidfd_getfd",
    )


def receive(listener: int) -> Syscall | None:
    """The next waiting call; None if its thread is gone meanwhile."""
    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECV, notice)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):
            return None
        raise
    call, thread, _ = struct.unpack_from("=QII", notice)
    number, _, _, *arguments = struct.unpack_from("=iIQ6Q", notice, 16)
    return Syscall(call, thread, number, tuple(arguments))


def let_pass(listener: int, call: Syscall) -> None:
    """Let the kernel do the call."""
    _answer(listener, struct.pack("=QqiI", call.id, 0, 0, _CONTINUE))


def done(listener: int, call: Syscall, error: int = 0) -> None:
    """Let the call return 0, or fail with `error`."""
    _answer(listener, struct.pack("=QqiI", call.id, 0, -error, 0))


def _answer(listener: int, answer: bytes) -> None:
    try:
        fcntl.ioctl(listener, _SEND, answer)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINPROGRESS):
            raise


def borrow(pidfd: int, fd: int) -> int:
    """A duplicate of descriptor `fd` of another process. Raises OSError."""
    duplicate = int(_libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if duplicate < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return duplicate
