"""Run a Python program in which the kernel refuses some system calls, as a container profile does.

python seccomp_deny.py NUMBER,NUMBER CODE [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys

CALLS = {
    "memfd_create": 319,
    "pidfd_open": 434,
    "pidfd_send_signal": 424,
    "process_vm_readv": 310,
}
"""On x86_64."""

_AUDIT_X86_64 = 0xC000003E
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def deny(numbers: list[int]) -> None:
    """Make these calls fail with EPERM from now on, in this process and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    parts = [(_LOAD, 4, 0, 0), (_JUMP_EQUAL, _AUDIT_X86_64, 1, 0), (_RETURN, _ALLOW, 0, 0), (_LOAD, 0, 0, 0)]
    parts += [(_JUMP_EQUAL, number, len(numbers) - place, 0) for place, number in enumerate(numbers)]
    parts += [(_RETURN, _ALLOW, 0, 0), (_RETURN, _ERRNO | errno.EPERM, 0, 0)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", c, e, o, v) for c, v, e, o in parts))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(parts), ctypes.addressof(program)))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    deny([int(number) for number in sys.argv[1].split(",")])
    code, sys.argv = sys.argv[2], sys.argv[2:]
    exec(compile(code, "denied", "exec"), {"__name__": "__main__"})
