"""A small file system for the files of a job, which can run full without harm to other programs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.comms.errors import Unsupported

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2


@contextmanager
def small_disk(path: Path, megabytes: float) -> Iterator[None]:
    """Mount an in-memory file system on the folder `path`. Raises `Unsupported` where that is forbidden."""
    options = f"size={int(megabytes * 1e6)},mode=0700".encode()
    if _libc.mount(b"holdfast", os.fsencode(path), b"tmpfs", 0, options) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise Unsupported(f"a file system of the job's own: mount says {reason}", "run as root, or leave out job.disk")
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
