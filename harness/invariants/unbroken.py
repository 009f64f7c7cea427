"""The protocol does not break by itself: no event brings the core into an impossible state."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Checker

STATE_APART = ("come apart", "call steps() alike")
"""Parts of a session's errors when ranks do not have the same state."""


class Unbroken(Checker):
    name: ClassVar[str] = "the core goes on"
    meaning: ClassVar[str] = "No process fails by its own membership core, and ranks never come apart in their state."

    def observe(self, event: Event) -> None:
        match event:
            case events.ViewInstalled():
                self.looked += 1
            case events.SessionFailed(error=error) if any(words in error for words in STATE_APART):
                self.violated(event, error)
            case events.CoreBroken(error=error):
                self.violated(event, error)
