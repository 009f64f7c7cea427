"""An evicted rank commits no step that the current members do not commit.

A process that has not heard of its eviction may still leave a barrier that all had entered: then the others commit the
step as well, by their votes. It must never commit a step that they undo, or never do.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class NoEvictedCommits(Checker):
    name: ClassVar[str] = "no evicted rank commits"
    meaning: ClassVar[str] = (
        "From the moment a view without a process is installed by any other, it commits no step but one that the "
        "others "
        "commit too."
    )

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._epoch = 0
        self._members: frozenset[str] = frozenset()
        self._late: dict[int, events.StepCommitted] = {}
        self._aborted: dict[int, int] = {}
        self._committed = -1

    def observe(self, event: Event) -> None:
        match event:
            case events.ViewInstalled() if event.epoch > self._epoch:
                self._epoch, self._members = event.epoch, frozenset(event.members)
            case events.StepAborted():
                step = event.step
                self._aborted[step] = max(event.epoch, self._aborted.get(step, 0))
                if step in self._late:
                    self._undone(self._late.pop(step))
            case events.StepCommitted() if self._epoch:
                self._commits(event)

    def finish(self) -> None:
        for step, event in self._late.items():
            if step > self._committed:
                self._undone(event)

    def _commits(self, event: events.StepCommitted) -> None:
        self.looked += 1
        step = event.step
        if event.process in self._members:
            self._committed = max(self._committed, step)
        elif step > self._committed and self._aborted.get(step, 0) > event.epoch:
            self._undone(event)
        elif step > self._committed:
            self._late[step] = event

    def _undone(self, event: events.StepCommitted) -> None:
        self.violated(
            event,
            f"committed step {event.step} of epoch {event.epoch}, after epoch "
            f"{self._epoch} had begun without it, and the others did not commit it",
        )
