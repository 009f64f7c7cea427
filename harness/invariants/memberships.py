"""The invariants of memberships: who is in which epoch, at which rank, and why it left."""

from __future__ import annotations

from typing import ClassVar

from msgspec import UNSET

from holdfast.ft import events
from holdfast.ft.console.units import counted
from holdfast.ft.events import Event
from holdfast.harness.invariants.checker import Bounds, Checker


class OneMembership(Checker):
    """One membership an epoch: all processes that install an epoch install the same members in the same order."""

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


class EpochsForward(Checker):
    """Epochs never go back: each epoch that a process installs or works in is newer than those before."""

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


class RankOrder(Checker):
    """Rank equals position: survivors keep their order, replacements take the ranks of the dead, joiners come last."""

    name: ClassVar[str] = "ranks keep their order"
    meaning: ClassVar[str] = (
        "From one epoch to the next survivors keep their order, nobody has two ranks, newcomers take the ranks of "
        "those that left or come last, and there are never fewer members than the job can run with."
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
    optional: ClassVar[bool] = True

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
