"""A full disk: the file system with the job's files (register, event logs) has no byte left."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, ClassVar

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
