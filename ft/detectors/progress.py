"""`progress` and `transport`: what ops say of other ranks, those that do not end and those that failed.

`progress` reports a rank that has not entered an op in which others wait. A rank that waits inside of an op for the
suspect time asks the other hosts' ranks for their positions; it reads those of its own host in shared memory. Ranks
that are behind are looked at and logged. When the time of the op is up, and the suspect time has brought newer
positions of all ranks that can answer, a rank that is behind is ended, or suspected if it is on another host: so a rank
that hangs costs the others an op, not the job.

Ops of a communicator have the same numbers on all ranks. A rank that computes for long is late too; it is reported, but
left alone until its time is up (`Timeouts.operation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed
from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.membership.events import Stalled
from holdfast.ft.membership.view import Member, Timeouts, View
from holdfast.ft.ports import OpPosition

_encode = msgspec.msgpack.Encoder().encode
_Count = Annotated[int, msgspec.Meta(ge=0)]
_words = msgspec.msgpack.Decoder(tuple[bool, _Count, _Count, bool])


class ProgressDetector(Detector):
    """Finds the members that the others wait for."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._progress = StragglerTracker(context.me, context.timeouts, context.processes.cpu_ticks)
        self._late: tuple[View, OpTimeout, float] | None = None

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._progress.follow(view)
        if self._late is not None and (view is None or view.epoch != self._late[0].epoch):
            self._late = None

    def beat(self, now: float) -> None:
        if self._progress.waiting(now):
            self.context.send_all(self._say(self._progress.mine, asking=True))

    def received(self, member_id: str, body: bytes, now: float) -> None:
        asking, epoch, entered, inside = _words.decode(body)
        self._progress.there(member_id, OpPosition(epoch, entered, inside))
        if asking:
            self.context.send(member_id, self._say(self.context.place(), asking=False))

    def _say(self, place: OpPosition, *, asking: bool) -> bytes:
        return _encode((asking, place.epoch, place.entered, place.inside))

    def placed(self, member_id: str, place: OpPosition) -> None:
        self._progress.there(member_id, place)

    def look(self, now: float) -> None:
        self._progress.here(self.context.place(), now)
        for late in self._progress.look(now):
            self.context.note(late)
        if self._late is not None and now - self._late[2] >= self.context.timeouts.suspect:
            (view, failure, _), self._late = self._late, None
            self._blame(view, failure, now)

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        if not isinstance(failure, OpTimeout):
            return
        if failure.joint:  # the known positions are as old as the last heartbeats
            self._late = (view, failure, now)
            self.context.send_all(self._say(self.context.place(), asking=True))
        else:
            self._blame(view, failure, now)

    def _blame(self, view: View, failure: OpTimeout, now: float) -> None:
        me = self.context.me
        behind = self._progress.behind(failure.joint)
        for member in behind:
            words = f"it held up {failure.op} until its time was up: {self._progress.words(member.id, now)}"
            if member.peer.host == me.peer.host:
                self.context.tell(Stalled(member.id, words))
            else:
                self.context.suspect(member.id, words)
        if not behind:
            for rank in failure.missing_ranks:
                if 0 <= rank < len(view.members) and view.members[rank].id != me.id:
                    self.context.suspect(view.members[rank].id, f"{me.id} waited for it in vain: {failure}")


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

    def look(self, now: float) -> tuple[events.MemberLate, ...]:
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
                evidence = f"{self.words(member.id, now)}; {doing}"
                late.append(events.MemberLate(member=member.id, op=self._mine.entered, evidence=evidence))
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


class TransportErrorsDetector(Detector):
    """Reports peers that a backend found to have failed, to all processes: the epoch is over then."""

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        if not isinstance(failure, PeerFailed):
            return
        for rank in failure.ranks:
            if 0 <= rank < len(view.members) and view.members[rank].id != self.context.me.id:
                evidence = f"the {view.job.backend} of {self.context.me.id} says: {failure.evidence}"
                self.context.suspect(view.members[rank].id, evidence)
