"""All ranks that complete a step hold equal bits: the logged digests of the state after the step are equal."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class EqualBits(Checker):
    name: ClassVar[str] = "equal bits"
    meaning: ClassVar[str] = "All who log a digest of their state after a step have the same digest."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._digests: dict[int, tuple[str, str]] = {}

    def observe(self, event: Event) -> None:
        match event:
            case (
                events.StateDigested(step=step, digest=str(digest))
                | events.StepCommitted(step=step, digest=str(digest))
                | events.StateReceived(step=step, digest=str(digest))
            ):
                self._compare(event, step, digest)

    def _compare(self, event: Event, step: int, digest: str) -> None:
        self.looked += 1
        first, agreed = self._digests.setdefault(step, (event.process, digest))
        if digest != agreed:
            self.violated(event, f"step {step} has digest {digest} here, and {agreed} on {first}")
