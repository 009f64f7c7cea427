"""The C library, and its failures as OSError."""

from __future__ import annotations

import ctypes
import os
from typing import Final

libc: Final = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name: str, result: int) -> int:
    """Return the result of a call of `libc`. Raises OSError, with the name of the call, where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return int(result)
