"""Copies between the memories of two processes of one host: process_vm_readv and process_vm_writev.

The kernel copies once, in the calling thread with the GIL released. The other process takes no part, and may be
stopped.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.comms import _native
from holdfast.comms.plugins.spec import Available, Unavailable
from holdfast.comms.system.files import advise
from holdfast.comms.system.local_causes import MEMORY_HINT
from holdfast.comms.tensors.memory import HUGE_PAGE as HUGE_PAGE

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


_libc = ctypes.CDLL(None, use_errno=True)


_MADV_COLLAPSE = 25  # since Linux 6.1
_AT_ONCE = 8 * HUGE_PAGE


def put_on_huge_pages(
    address: int, nbytes: int, seconds: float = math.inf, look: Callable[[], None] = lambda: None
) -> int:
    """Move this process's memory to huge pages where they fit, within `seconds` (64 MiB take 0.04 to 0.3).

    The contents do not change; memory that the kernel cannot move, such as that which a device has pinned, stays where
    it is. `look`, which may raise, is called now and then. Returns the bytes that lie there.
    """
    moved = 0
    until, end = time.monotonic() + seconds, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    for begin in range(-(-address // HUGE_PAGE) * HUGE_PAGE, end, _AT_ONCE):
        look()
        if time.monotonic() > until:
            break
        length = min(_AT_ONCE, end - begin)
        if advise(begin, length, _MADV_COLLAPSE):
            moved += length
    return moved


MOST_BYTES = 0x7FFFF000
"""The most bytes that the kernel moves in one system call; larger copies take several."""


def read_process(pid: int, *pieces: int, most: int = MOST_BYTES) -> int:
    """Copy pieces (local address, remote address, nbytes; flat) from process `pid`, in order; returns the bytes copied.

    Fewer bytes than asked for mean that the next one is not mapped there. Raises OSError if none could be copied: ESRCH
    for a process that is gone, EPERM if the system forbids it, EFAULT for memory that is not there. One system call
    asks for at most `most` bytes.
    """
    return _native.copy_process(pid, False, most, *pieces)


def write_process(pid: int, *pieces: int, most: int = MOST_BYTES) -> int:
    """Copy pieces (local address, remote address, nbytes; flat) to process `pid`; else like `read_process`."""
    return _native.copy_process(pid, True, most, *pieces)


def permit_peers() -> None:
    """Let all processes of this user copy from and to this one; Yama may allow that only to parents."""
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def probe() -> Available | Unavailable:
    """Whether processes here may read each other's memory, as far as one process can tell."""
    if not hasattr(_libc, "process_vm_readv"):
        return Unavailable("this system has no process_vm_readv", "use Linux")
    word, copy = ctypes.c_uint64(0x686F6C64), ctypes.c_uint64(0)
    try:
        read_process(os.getpid(), ctypes.addressof(copy), ctypes.addressof(word), 8)
    except OSError as error:
        return Unavailable(f"process_vm_readv fails: {error.strerror}", MEMORY_HINT)
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope >= 2 and not (scope == 2 and _may_trace_all()):
        return Unavailable(f"Yama forbids reading other processes (ptrace_scope {scope})", MEMORY_HINT)
    return Available("process_vm_readv")


def _may_trace_all() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 19 & 1)
    return False
