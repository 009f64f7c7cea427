"""No evicted rank commits: who is not in the newest view that anybody installed commits nothing in an older one."""

from __future__ import annotations

from typing import ClassVar

from holdfast.harness.invariants.checker import Bounds, Checker
from holdfast.harness.invariants.events import Event


class Evicted(Checker):
    name: ClassVar[str] = "no evicted rank commits"
    meaning: ClassVar[str] = "From the moment a view without a process is installed by any other, it commits no step."

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._epoch = 0
        self._members: frozenset[str] = frozenset()

    def observe(self, event: Event) -> None:
        if event.kind == "installed" and event.integer("epoch") > self._epoch:
            self._epoch, self._members = event.integer("epoch"), frozenset(event.names("members"))
        elif event.kind == "committed" and self._epoch:
            self.looked += 1
            if event.process not in self._members:
                self.violated(
                    event,
                    f"committed step {event.integer('step')} of epoch {event.integer('epoch')}, after epoch "
                    f"{self._epoch} had begun without it",
                )
