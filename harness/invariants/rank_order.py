"""Rank equals position: survivors keep their order, replacements take the ranks of the dead, joiners come last."""

from __future__ import annotations

from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class RankOrder(Checker):
    name: ClassVar[str] = "ranks keep their order"
    meaning: ClassVar[str] = (
        "From one epoch to the next survivors keep their order, nobody has two ranks, newcomers take the ranks of "
        "those "
        "that left or come last, and there are never fewer members than the job can run with."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._newest: tuple[int, tuple[str, ...]] = (0, ())

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled) or event.epoch <= self._newest[0]:
            return
        self.looked += 1
        (before, old), (epoch, new) = self._newest, (event.epoch, event.members)
        self._newest = (epoch, new)
        known = set(new)
        if len(known) != len(new):
            self.violated(event, f"somebody has two ranks of epoch {epoch}: {_few(new)}")
        if event.min_size is not UNSET and len(new) < event.min_size:
            self.violated(event, f"epoch {epoch} has {counted(len(new), 'member')}, the job needs {event.min_size}")
        if before == 0 or epoch != before + 1:
            return
        were = set(old)
        if [who for who in old if who in known] != [who for who in new if who in were]:
            self.violated(event, f"survivors changed their order: {_few(old)} became {_few(new)}")
        elif list(new) != _lawful(old, [who for who in new if who not in were], known):
            self.violated(event, f"newcomers have not taken the ranks that were left: {_few(old)} became {_few(new)}")


def _lawful(old: tuple[str, ...], newcomers: list[str], known: set[str]) -> list[str]:
    """The expected members: newcomers take the first ranks that became free, further ones come last."""
    lawful = []
    for who in old:
        if who in known:
            lawful.append(who)
        elif newcomers:
            lawful.append(newcomers.pop(0))
    return lawful + newcomers


def _few(members: tuple[str, ...]) -> str:
    return ", ".join(members[:8]) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
