"""The evidence that remains where a detector of this host is missing or has failed: looks at /proc, and messages."""

from __future__ import annotations

from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.process_watch import death_of
from holdfast.ft.detectors.silence import SilenceTracker
from holdfast.ft.membership.events import ProvenDeaths, Stalled
from holdfast.ft.membership.view import Member, View

EVIDENCE = {
    "pidfd": "looks at /proc once a heartbeat",
    "heartbeat": "heartbeats in messages, and looks at /proc",
}
"""By the name of a detector that is missing: what this one goes by instead."""


class StandInDetector(Detector):
    """Does the work of the detectors that it covers; slower, and with nothing of the kernel's that can be forbidden."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._silence = SilenceTracker(context.me, context.timeouts, context.processes.is_stopped)
        self._covered: set[str] = set()
        self._mates: dict[str, Member] = {}
        self._gone: set[str] = set()

    def cover(self, name: str) -> None:
        """Take the place of another detector; call `follow` next."""
        self._covered.add(name)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        me = self.context.me.peer
        mates = {m.id: m for m in watched if m.peer.host == me.host and m.peer.pid != me.pid}
        self._mates = mates if "pidfd" in self._covered else {}
        self._gone &= mates.keys()
        self._silence.follow(mates.values() if "heartbeat" in self._covered else (), self.context.loop.time())

    def heard(self, member_id: str, now: float) -> None:
        for finding in self._silence.hear(member_id, now):
            self.context.tell(finding)

    def look(self, now: float) -> None:
        ended = [m for m in self._mates.values() if m.id not in self._gone and self.context.processes.is_gone(m.peer)]
        self._gone |= {member.id for member in ended}
        if ended:
            self.context.tell(ProvenDeaths(tuple(map(death_of, ended))))
        for finding in self._silence.look(now):
            if isinstance(finding, Stalled):
                self.context.note(events.MemberStalled(member=finding.member, evidence=finding.evidence))
            self.context.tell(finding)
        self.doubtful = self._silence.any_silent

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)
