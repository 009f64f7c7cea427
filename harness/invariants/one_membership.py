"""One membership an epoch: all processes that install an epoch install the same members in the same order."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class OneMembership(Checker):
    name: ClassVar[str] = "one membership an epoch"
    meaning: ClassVar[str] = (
        "All who install an epoch have the same members, in the same rank order, and are one of them."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._first: dict[int, tuple[str, tuple[str, ...]]] = {}
        self._equal: dict[int, tuple[str, ...]] = {}
        """The object last found equal to the first: processes share the object of a view from one message."""

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled):
            return
        self.looked += 1
        epoch, members = event.epoch, event.members
        first, agreed = self._first.setdefault(epoch, (event.process, members))
        if members is not agreed and members is not self._equal.get(epoch):
            if members == agreed:
                self._equal[epoch] = members
            else:
                self.violated(event, f"epoch {epoch} has members {members} here, and {agreed} on {first}")
        rank = event.rank
        if rank is None or not (0 <= rank < len(members) and members[rank] == event.process):
            self.violated(event, f"is rank {rank} of epoch {epoch}, whose members are {members[:8]}")
