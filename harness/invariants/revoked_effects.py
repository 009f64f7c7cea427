"""No effect of a revoked epoch: after revoking it a process prepares and commits nothing more in it.

A decision of the recovery on an open step (`how` is not "normal") is an effect of the next epoch.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker

BY_ALL = "normal"
"""`how` of a step that was committed in the epoch of its attempt."""


class RevokedEffects(Checker):
    name: ClassVar[str] = "no effect of a revoked epoch"
    meaning: ClassVar[str] = "A process that has revoked an epoch begins, prepares and commits nothing more in it."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._revoked: dict[str, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, events.EpochRevoked):
            newest = self._revoked.get(event.process, 0)
            self._revoked[event.process] = max(newest, event.epoch)
            return
        if not isinstance(event, events.StepBegun | events.StepPrepared | events.StepCommitted):
            return
        self.looked += 1
        epoch, revoked = event.epoch, self._revoked.get(event.process, 0)
        if epoch > revoked or (isinstance(event, events.StepCommitted) and event.how != BY_ALL):
            return
        self.violated(event, f"{event.kind} of step {event.step} in epoch {epoch}, revoked up to {revoked}")
