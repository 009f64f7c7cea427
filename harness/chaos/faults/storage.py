"""Faults of where a job keeps its files: its register is locked, gone or stopped; its disk is full."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from holdfast.comms.errors import Unsupported
from holdfast.harness.chaos.fault_type import FaultType, Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario import Scenario

WAYS = {"sqlite": ("locked", "gone"), "tcp": ("stopped",), "etcd": ("stopped", "leader-killed")}
"""The ways in which each kind of register can be away."""


class RegisterOutage(FaultType, frozen=True, kw_only=True):
    """The job's register cannot be used.

    `how`, for a file: "locked": another process holds its write lock; "gone": it is not where it was. For a server:
    "stopped": none of its processes runs. For etcd: "leader-killed": the leading node is killed, the others elect
    another; it is started again after `lasts`.
    """

    summary: ClassVar[str] = "register away"
    how: Literal["locked", "gone", "stopped", "leader-killed"] = "locked"

    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family == "rl":
            raise ValueError("each driver of a run has a register of its own, which cannot be broken from here")
        register = scenario.job.register
        if self.how not in WAYS[register]:
            ways = " or ".join(f'"{way}"' for way in WAYS[register])
            raise ValueError(f'how = "{self.how}" cannot happen to job.register = "{register}", only {ways}')
        if self.how == "leader-killed" and scenario.job.register_nodes < 3:
            raise ValueError('how = "leader-killed" needs nodes that elect another: job.register_nodes = 3')

    def inject(self, context: FaultContext) -> Undo | None:
        if self.how in WAYS["sqlite"]:
            path = context.register_file()
            context.note("register-away", [], self.how)
            return _lock(path) if self.how == "locked" else _hide(path)
        server = context.register_server()
        context.note("register-away", [], self.how)
        if self.how == "leader-killed":
            return server.kill_leader()
        server.pause()
        return server.resume

    def words(self) -> str:
        return f"{self.summary}: {self.how}"


def _lock(path: Path) -> Undo:
    connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except BaseException:
        connection.close()
        raise
    return connection.close


def _hide(path: Path) -> Undo:
    hidden = path.with_name(path.name + ".hidden")
    path.rename(hidden)

    def restore() -> None:
        with contextlib.suppress(FileNotFoundError):
            hidden.rename(path)

    return restore


# The disk -------------------------------------------------------------------------------------------------------------


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
