"""`observers`: heartbeats between hosts. Each member is watched by members of other hosts, and most of them must agree.

The membership chooses the processes that each process watches, and evicts a member that most observers suspect.
`holdfast.ft.detectors.partition` draws the further conclusions from suspicions.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.ft import events
from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.partition import SuspicionGraph
from holdfast.ft.detectors.silence import SilenceEvent, SilenceTracker
from holdfast.ft.membership.events import Cleared, Stalled, Suspicion, Unreachable
from holdfast.ft.membership.view import Member, View

NOT_LISTENING = "its host says that nobody listens at its address any more"


class ObserversDetector(Detector):
    """Suspects silent members of other hosts; detects that this process is cut off, and which members break
    connectivity.
    """

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._silence = SilenceTracker(context.me, context.timeouts, lambda pid: False)
        self._observers = SuspicionGraph(context.me, context.timeouts)
        self._view: View | None = None
        self._watched: tuple[Member, ...] = ()
        self._not_listening: set[str] = set()

    @property
    def missed(self) -> int:
        return self._silence.missed

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        here = self.context.me.peer.host
        self._silence.follow([m for m in watched if m.peer.host != here], self.context.loop.time())
        self._observers.follow(view, watched)
        self._view, self._watched = view, watched
        self._not_listening &= {member.id for member in watched}

    def heard(self, member_id: str, now: float) -> None:
        self._not_listening.discard(member_id)
        for finding in self._silence.hear(member_id, now):
            if isinstance(finding, Cleared):
                self._observers.clear(self.context.me.id, member_id)
                self.context.note(events.SuspicionCleared(member=member_id))
                self.context.tell(finding)

    def reported(self, observer: str, member: str, evidence: str | None, now: float) -> None:
        if evidence is None:
            self._observers.clear(observer, member)
        else:
            self._observers.suspect(observer, member, evidence, now)

    def suspected(self, observer: str, member: str, evidence: str, now: float) -> None:
        self._observers.report(observer, member, evidence, now)

    def refused(self, member_id: str, now: float) -> None:
        self._not_listening.add(member_id)
        self._suspect(self._silence.doubt(member_id, NOT_LISTENING), now)

    def _suspect(self, findings: Iterable[SilenceEvent], now: float) -> None:
        for seen in findings:
            if isinstance(seen, Suspicion):
                self._observers.suspect(self.context.me.id, seen.member, seen.evidence, now)
                self.context.note(events.MemberSuspected(member=seen.member, evidence=seen.evidence))
                self.context.tell(seen)

    def look(self, now: float) -> None:
        self._suspect(self._silence.look(now), now)
        for finding in self._observers.look(now):
            match finding:
                case events.LostMajority():
                    self.context.note(finding)
                    self.context.stop(finding.evidence)
                case events.ResignedItself():
                    self.context.note(finding)
                    self.context.resign(finding.evidence)
                case Unreachable(member, evidence):
                    self.context.note(events.MemberUnreachable(member=member, evidence=evidence))
                    self._remove(finding)
        self.doubtful = self._silence.any_silent or self._observers.in_doubt

    def _remove(self, finding: Unreachable) -> None:
        """End a member of this host for certain; go on without one of another host.

        So is it with a member of this host that no longer listens, as this process has seen: it has left, and may join
        again before this process learns that both were evicted.
        """
        member = finding.member
        if self._host_of(member) == self.context.me.peer.host and member not in self._not_listening:
            self.context.tell(Stalled(member, finding.evidence))
        else:
            self.context.tell(finding)

    def _host_of(self, member: str) -> str | None:
        rank = self._view.rank_of(member) if self._view is not None else None
        if self._view is not None and rank is not None:
            return self._view.members[rank].peer.host
        return next((m.peer.host for m in self._watched if m.id == member), None)
