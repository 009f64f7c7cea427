"""Finds the ranks that hold up the others: those that have not entered an op in which other ranks wait.

Ops of a communicator have the same numbers on all ranks. Sans-I/O: the caller passes the time, the positions of this
process and the others, and a function that looks at a process of this host. A rank that computes for long is late too;
it is reported, but left alone until its time is up (`Timeouts.operation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.ft.membership.view import Member, View
from holdfast.ft.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class OpPosition:
    """The number of ops that a process has entered in `epoch`, and whether it is `inside` of the last one."""

    epoch: int
    entered: int
    inside: bool


@dataclass(frozen=True, slots=True)
class Straggler:
    """A member that has not entered an op in which this process waits, with what a look at it showed."""

    member: str
    op: int
    evidence: str


class StragglerTracker:
    """Compares the positions of the members. `cpu_ticks(pid)` is the processor time of a process of this host."""

    def __init__(self, me: Member, timeouts: Timeouts, cpu_ticks: Callable[[int], int]) -> None:
        self._me, self._timeouts, self._cpu_ticks = me, timeouts, cpu_ticks
        self._view: View | None = None
        self._mine = OpPosition(0, 0, False)
        self._since = 0.0
        self._places: dict[str, OpPosition] = {}
        self._told: set[tuple[str, int]] = set()
        self._ticks: dict[str, int] = {}

    def follow(self, view: View | None) -> None:
        """Compare the members of `view` from now on."""
        if view is None or self._view is None or view.epoch != self._view.epoch:
            self._places, self._told, self._ticks = {}, set(), {}
        self._view = view

    def here(self, place: OpPosition, now: float) -> None:
        """Set the position of this process."""
        if place != self._mine:
            self._mine, self._since = place, now

    @property
    def mine(self) -> OpPosition:
        """The position of this process that was set last."""
        return self._mine

    def waiting(self, now: float) -> bool:
        """Whether this process has been inside of one op for the suspect time."""
        view = self._view
        in_it = self._mine.inside and view is not None and view.epoch == self._mine.epoch
        return in_it and now - self._since >= self._timeouts.suspect

    def there(self, member: str, place: OpPosition) -> None:
        """Set the position of another process."""
        self._places[member] = place

    def behind(self, op: int) -> tuple[Member, ...]:
        """The members that are known not to have entered op number `op`."""
        view = self._view
        if view is None:
            return ()
        return tuple(
            member
            for member in view.members
            if member.id != self._me.id
            and (place := self._places.get(member.id)) is not None
            and place.epoch == view.epoch
            and place.entered < op
        )

    def look(self, now: float) -> tuple[Straggler, ...]:
        """The members that this process waits for; each is returned once an op, at its second look."""
        if not self.waiting(now):
            return ()
        late = []
        for member in self.behind(self._mine.entered):
            key = (member.id, self._mine.entered)
            if key in self._told:
                continue
            doing = self._doing(member)
            if doing is not None:
                self._told.add(key)
                late.append(Straggler(member.id, self._mine.entered, f"{self.words(member.id, now)}; {doing}"))
        return tuple(late)

    def words(self, member: str, now: float) -> str:
        """How far a member is behind, in words."""
        place, mine = self._places[member], self._mine
        return f"it has entered {place.entered} ops, {mine.entered} are entered here since {now - self._since:.2f} s"

    def _doing(self, member: Member) -> str | None:
        """What a look at the process shows; None at the first look."""
        if member.peer.host != self._me.peer.host:
            return "it is on another host"
        before, ticks = self._ticks.get(member.id), self._cpu_ticks(member.peer.pid)
        self._ticks[member.id] = ticks
        if before is None:
            return None
        return "it computes: its processor time moves" if ticks > before else "it waits: its processor time stands"
