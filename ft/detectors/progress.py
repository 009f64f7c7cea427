"""`progress`: reports a rank that has not entered an op in which others wait.

A rank that waits inside of an op for the suspect time asks the other hosts' ranks for their positions; it reads those
of its own host in shared memory. Ranks that are behind are looked at and logged. When the time of the op is up, and the
suspect time has brought newer positions of all ranks that can answer, a rank that is behind is ended, or suspected if
it is on another host: so a rank that hangs costs the others an op, not the job.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.stragglers import OpPosition, StragglerTracker
from holdfast.ft.membership.events import Stalled
from holdfast.ft.membership.view import Member, View

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
            self.context.note(events.MemberLate(member=late.member, op=late.op, evidence=late.evidence))
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
