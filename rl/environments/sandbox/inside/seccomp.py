"""The filter of system calls that a run cannot remove: an allow-list, assembled for the kernel's BPF machine.

A call outside of the list fails with EPERM, so that ordinary code sees an ordinary error. A call that only an attack
makes (`syscalls.fatal`) kills the process. Four calls pass by their arguments: `clone` without new namespaces, `ioctl`
with the requests of ordinary files, `prlimit64` of the caller itself, `socketpair` of Unix sockets (asyncio needs it).

Stops: a program in its place (`execve`), tracing, new namespaces, and calls that reach rarely used parts of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from holdfast.rl.environments.sandbox.inside import syscalls
from holdfast.rl.environments.sandbox.inside.syscalls import call, libc

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""

_X32 = 0x40000000
"""Set in the numbers of the x32 calls, which reach the same kernel by another table."""

_CLONE_OUTSIDE = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x8000
"""`clone` flags: new cgroup, mount, uts, ipc, user, pid and net namespaces; a sibling instead of a child."""

_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

_PRCTLS = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""

_SET_MODE_FILTER, _NO_NEW_PRIVS = 1, 38
_UNIX = 1


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _instruction(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


def _answer(number: int, action: int) -> Iterator[bytes]:
    yield _instruction(_JUMP_EQUAL, number, 0, 1)
    yield _instruction(_RETURN, action)


def _if_argument(number: int, place: int, values: Sequence[int], refusal: int) -> Iterator[bytes]:
    """Let call `number` pass if the low half of one argument is among `values`."""
    yield _instruction(_JUMP_EQUAL, number, 0, len(values) + 3)
    yield _instruction(_LOAD, _ARGUMENTS + 8 * place)
    for index, value in enumerate(values):
        yield _instruction(_JUMP_EQUAL, value, len(values) - index, 0)
    yield _instruction(_RETURN, refusal)
    yield _instruction(_RETURN, _ALLOW)


def _unless_bits(number: int, place: int, bits: int, refusal: int) -> Iterator[bytes]:
    yield _instruction(_JUMP_EQUAL, number, 0, 4)
    yield _instruction(_LOAD, _ARGUMENTS + 8 * place)
    yield _instruction(_JUMP_ANY_BIT, bits, 0, 1)
    yield _instruction(_RETURN, refusal)
    yield _instruction(_RETURN, _ALLOW)


@cache
def program(machine: str) -> bytes:
    """The filter for a machine, "x86_64" or "aarch64"."""
    calls = syscalls.conditional(machine)
    refused = _ERRNO | errno.EPERM
    parts: list[Iterable[bytes]] = [
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_JUMP_EQUAL, syscalls.AUDIT[machine], 1, 0),
            _instruction(_RETURN, _KILL),
            _instruction(_LOAD, _NUMBER),
            _instruction(_JUMP_GREATER_EQUAL, _X32, 0, 1),
            _instruction(_RETURN, _KILL),
        ],
        *(_answer(number, _ALLOW) for number in syscalls.allowed(machine).values()),
        *(_answer(number, _KILL) for number in syscalls.fatal(machine).values()),
        _answer(calls["clone3"], _ERRNO | errno.ENOSYS),
        _unless_bits(calls["clone"], 0, _CLONE_OUTSIDE, _KILL),
        _if_argument(calls["ioctl"], 1, _IOCTLS, _ERRNO | errno.ENOTTY),
        _if_argument(calls["prctl"], 0, _PRCTLS, refused),
        _if_argument(calls["prlimit64"], 0, (0,), refused),
        _if_argument(calls["socketpair"], 0, (_UNIX,), refused),
        [_instruction(_RETURN, refused)],
    ]
    return b"".join(instruction for part in parts for instruction in part)


def install(machine: str) -> None:
    """Put the filter on this process and on all that it starts, for good. Raises OSError."""
    code = ctypes.create_string_buffer(program(machine))
    described = _Program((len(code) - 1) // 8, ctypes.addressof(code))
    call("prctl", libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    call("seccomp", libc.syscall(syscalls.number("seccomp"), _SET_MODE_FILTER, 0, ctypes.byref(described)))
