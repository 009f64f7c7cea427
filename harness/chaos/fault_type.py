"""The base class of fault types, and their registry: holdfast's and those of plugins (hook `holdfast_faults`).

A fault type is a frozen `msgspec.Struct`: its fields are the keys that a `[[fault]]` table may have besides `type`,
`at` and `lasts`.

class Freeze(FaultType):
    summary: ClassVar[str] = "a rank stops"
    rank: int = 0

    def inject(self, context):
        victims = context.find(self.rank)
        context.note("pause", victims)
        ...
        return heal                     # called after `lasts` seconds, or at the end
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec

from holdfast.comms.plugins.registry import plugin_manager

if TYPE_CHECKING:
    from holdfast.harness.chaos.run.fault_context import FaultContext
    from holdfast.harness.chaos.scenario import Scenario

Undo = Callable[[], None]

_log = logging.getLogger(__name__)


class FaultType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of fault. `summary` says what it breaks, in a few words."""

    summary: ClassVar[str] = ""
    counter: ClassVar[str] = ""
    """Of faults of links: which count of `LinkTraffic` shows that the fault changed something."""

    def check(self, scenario: Scenario) -> None:
        """Raise ValueError, saying why, if this cannot be injected in the scenario."""
        return

    def stalls(self, scenario: Scenario) -> str:
        """Why a job of the scenario gets no further while this lasts; empty if it does."""
        return ""

    def drawn(self, dice: random.Random, scenario: Scenario) -> Self:
        """This fault with all random choices made, from `dice` alone."""
        return self

    def inject(self, context: FaultContext) -> Undo | None:
        """Call `context.note`, then break it. Returns a call that heals it, or None if it cannot be healed."""
        raise NotImplementedError

    def words(self) -> str:
        """A description of the fault for people."""
        return self.summary


def fault_types() -> dict[str, type[FaultType]]:
    """The fault types of all plugins by name. A plugin that fails, or offers something else, is logged and left out.

    Raises ValueError if two plugins claim one name.
    """
    found: dict[str, type[FaultType]] = {}
    for implementation in plugin_manager().hook.holdfast_faults.get_hookimpls():
        try:
            offered = dict(implementation.function())  # type: ignore[call-overload]
        except Exception:
            _log.exception("plugin %s offers no faults: it failed", implementation.plugin_name)
            continue
        for name, kind in offered.items():
            if not (isinstance(kind, type) and issubclass(kind, FaultType)):
                _log.error("plugin %s: fault %r is %r, no FaultType", implementation.plugin_name, name, kind)
            elif name in found:
                raise ValueError(f"two plugins offer a fault {name!r}; remove one")
            else:
                found[name] = kind
    return found
