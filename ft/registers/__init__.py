"""Registers hold the few bytes that all processes of a job must agree on. The scheme of a URL selects one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.comms.plugins.registry import plugin_manager
from holdfast.ft.registers.cell import Cell, RegisterAway, RegisterBusy, change_cell

__all__ = ["Cell", "RegisterAway", "RegisterBusy", "change_cell", "open_cell", "schemes"]

_log = logging.getLogger(__name__)


def schemes() -> dict[str, Callable[[str, str], Cell]]:
    """URL scheme -> factory(url, cell_name), from every plugin; a plugin that raises is left out and logged.

    Raises ValueError if two plugins claim one scheme.
    """
    found: dict[str, Callable[[str, str], Cell]] = {}
    for implementation in plugin_manager().hook.holdfast_registers.get_hookimpls():
        try:
            offered: dict[str, Callable[[str, str], Cell]] = dict(implementation.function())  # type: ignore[call-overload]
        except Exception:
            _log.exception("plugin %s offers no registers: it failed", implementation.plugin_name)
            continue
        if twice := found.keys() & offered.keys():
            raise ValueError(f"two plugins offer registers for {', '.join(sorted(twice))}://; remove one")
        found.update(offered)
    return found


def open_cell(url: str, name: str) -> Cell:
    """Open the cell `name` of the register at `url`, such as `memory://job` or `sqlite:///run/user/1000/job.sqlite`.

    A missing register is created if its kind allows that. Raises ValueError for a URL that is not a register's,
    `RegisterAway` if the register cannot be reached or used, `CorruptData` if something else is in its place.
    """
    if not name:
        raise ValueError("a cell needs a name")
    scheme, separator, _ = url.partition("://")
    known = schemes()
    if not separator or scheme not in known:
        raise ValueError(
            f"{url!r} is not a register URL; known are {', '.join(f'{each}://' for each in sorted(known))}"
        )
    return known[scheme](url, name)
