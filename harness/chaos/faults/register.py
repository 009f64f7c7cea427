"""Faults of the register: nobody can change it, or nobody can find it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from holdfast.harness.chaos.fault_type import FaultType, Undo

if TYPE_CHECKING:
    from holdfast.harness.chaos.scenario import Scenario
    from holdfast.harness.chaos.stage import Stage


class RegisterAway(FaultType, frozen=True, kw_only=True):
    """The job's register cannot be used: `how` "locked": another process holds its write lock; "gone": its file is not
    where it was.
    """

    summary: ClassVar[str] = "register away"
    how: Literal["locked", "gone"] = "locked"

    def check(self, scenario: Scenario) -> None:
        if scenario.workload.family == "demo":
            raise ValueError("the demo's register cannot be broken from here")

    def strike(self, stage: Stage) -> Undo | None:
        path = stage.register_file()
        stage.note("register-away", [], how=self.how)
        return _lock(path) if self.how == "locked" else _hide(path)

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
