"""holdfast's own registers, offered through the entry-point group `holdfast` like anybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.comms.plugins import hookimpl
from holdfast.ft.registers.cell import Cell


def _memory(url: str, name: str) -> Cell:
    from holdfast.ft.registers.memory import MemoryCell

    return MemoryCell(url, name)


def _sqlite(url: str, name: str) -> Cell:
    from holdfast.ft.registers.sqlite import SqliteCell

    return SqliteCell(url, name)


@hookimpl
def holdfast_registers() -> Mapping[str, Callable[[str, str], Cell]]:
    return {"memory": _memory, "sqlite": _sqlite}
