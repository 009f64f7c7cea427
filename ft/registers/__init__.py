"""Registers: where a job keeps the few bytes that all its processes must agree on, chosen by the scheme of a
URL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.comms.plugins.registry import plugin_manager
from holdfast.ft.registers.cell import Cell, RegisterAway, RegisterBusy

__all__ = ["Cell", "RegisterAway", "RegisterBusy", "open_cell", "schemes"]

_log = logging.getLogger(__name__)


def schemes() -> dict[str, Callable[[str, str], Cell]]:
    """URL scheme -> factory(url, cell_name), from every plugin; a plugin that fails to say is left out and
    logged.

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
    """Open the cell `name` of the register at `url`, such as `memory://job` or
    `sqlite:///run/user/1000/job.sqlite`.

    A register that is not there yet is created if its kind can be. Raises ValueError for a URL that nobody
    can open, `RegisterAway` if it cannot be reached or used, `CorruptData` if what is there is not a
    register.
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
