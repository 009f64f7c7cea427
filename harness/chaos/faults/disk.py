"""A full disk: the job's files (register, event logs) are on a small file system, which has no byte left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from holdfast.comms.errors import Unsupported
from holdfast.harness.chaos.scenario.fault_type import FaultType, Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario.scenario import Scenario

_PIECE = 1 << 16


class DiskFull(FaultType, frozen=True, kw_only=True):
    """Fills the disk, and frees it when the fault is over. The job must have a `disk`."""

    summary: ClassVar[str] = "disk full"

    def check(self, scenario: Scenario) -> None:
        if scenario.job.disk is None:
            raise ValueError("disk-full needs job.disk = megabytes: a file system of the job's own (as root)")

    def inject(self, context: FaultContext) -> Undo | None:
        path = context.directory / "filling"
        context.note("disk-full", [])
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _PIECE
        while size:
            try:
                os.write(fd, bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
        os.close(fd)

        def give_back() -> None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

        return give_back


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
