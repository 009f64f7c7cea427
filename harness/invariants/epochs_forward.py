"""Epochs never go back: each epoch that a process installs or works in is newer than those before."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class EpochsForward(Checker):
    name: ClassVar[str] = "epochs never go back"
    meaning: ClassVar[str] = "A process installs ever newer epochs, and begins no step in one that it has left."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._installed: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if not isinstance(event, events.ViewInstalled | events.StepBegun | events.StepPrepared):
            return
        self.looked += 1
        epoch, newest = event.epoch, self._installed.get(event.process, 0)
        if isinstance(event, events.ViewInstalled):
            if epoch <= newest:
                self.violated(event, f"installs epoch {epoch} after {newest}")
            self._installed[event.process] = max(epoch, newest)
        elif epoch != newest:
            self.violated(event, f"{event.kind} of step {event.step} in epoch {epoch}, while in {newest}")
