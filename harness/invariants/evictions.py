"""No healthy process is evicted: an evicted one has ended, stood still, or was silent to most of its observers."""

from __future__ import annotations

from typing import ClassVar

from holdfast.ft import events
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker

WINDOW = 1.5
"""Seconds for which a retracted suspicion may still count: the retraction may be cut off."""
ENDED = (
    events.ProcessDied
    | events.SessionFailed
    | events.StepsFinished
    | events.WasEvicted
    | events.CoreBroken
    | events.ResignedItself
)


class EvictionsJustified(Checker):
    """Checks only simulated runs: their logs have the end and the pauses of every process.

    Such a log begins with an event `simulated`, and has `died`, `stopped`, and `suspected` with `of`, the number of
    observers.
    """

    name: ClassVar[str] = "nobody healthy is evicted"
    meaning: ClassVar[str] = (
        "Whoever is left out of an epoch had ended, had been stopped, could not work with others for long, or was not "
        "heard, a moment before, by at least half of those who watch it."
    )
    needs_simulation: ClassVar[bool] = True

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._knows = False
        self._epoch = 0
        self._members: tuple[str, ...] = ()
        self._gone: set[str] = set()
        self._stopped: dict[str, float] = {}
        self._doubts: dict[str, dict[str, tuple[float, float]]] = {}
        self._observers: dict[str, int] = {}
        self._failed: set[str] = set()

    def observe(self, event: Event) -> None:
        match event:
            case events.SimulationBegun():
                self._knows = True
            case events.ViewInstalled() if self._knows and event.epoch > self._epoch:
                self._installed(event)
            case events.ProcessStopped():
                self._stopped[event.process] = event.time + event.seconds
            case events.MemberSuspected(member=member, of=int(of)):
                self._doubts.setdefault(member, {})[event.process] = (event.time, float("inf"))
                self._observers[member] = of
            case events.SuspicionCleared():
                doubts = self._doubts.get(event.member, {})
                if event.process in doubts:
                    doubts[event.process] = (doubts[event.process][0], event.time)
            case events.MemberUnreachable():
                self._failed.add(event.member)
            case _ if isinstance(event, ENDED):
                self._gone.add(event.process)

    def _installed(self, event: events.ViewInstalled) -> None:
        epoch, members = event.epoch, event.members
        known = set(members)
        left = [who for who in self._members if who not in known] if epoch == self._epoch + 1 else []
        self._epoch, self._members = epoch, members
        for who in left:
            self.looked += 1
            if not self._justified(who, event.time):
                self.violated(event, f"{who} is not in epoch {epoch} any more, though it lives and can be heard")

    def _justified(self, who: str, now: float) -> bool:
        if who in self._gone or who in self._failed or self._stopped.get(who, -1e9) >= now - WINDOW:
            return True
        doubters = sum(until >= now - WINDOW for _, until in self._doubts.get(who, {}).values())
        return 2 * doubters >= max(1, self._observers.get(who, 0))
