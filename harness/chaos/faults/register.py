"""Faults of the register: its file is locked or gone, its server is stopped, or its leader is killed."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from holdfast.harness.chaos.scenario.fault_type import FaultType, Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario.scenario import Scenario

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
