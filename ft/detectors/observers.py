"""`observers`: heartbeats between hosts. Each member is watched by some on other hosts, and most of them must agree.

Whom a process watches, and what most observers make of a member, is the membership's to say; what suspicions add up to
beyond that is worked out by `holdfast.ft.detectors.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.partition import Condemned, CutOff, Observers, Resign
from holdfast.ft.detectors.silence import Silence, Verdict
from holdfast.ft.membership.events import Cleared, Death, ProvenDeaths, Stalled, Suspicion
from holdfast.ft.membership.view import Member, View

NOBODY_LISTENS = "its host says that nobody listens at its address any more"


class Observing(Detector):
    """Suspects the silent of other hosts; finds out that this process is cut off, and who is in everybody's way."""

    def __init__(self, surroundings: DetectorContext) -> None:
        super().__init__(surroundings)
        self._silence = Silence(surroundings.me, surroundings.timeouts, lambda pid: False)
        self._observers = Observers(surroundings.me, surroundings.timeouts)
        self._view: View | None = None
        self._watched: tuple[Member, ...] = ()

    @property
    def missed(self) -> int:
        return self._silence.missed

    def silent_for(self, member_id: str, now: float) -> float | None:
        return self._silence.silent_for(member_id, now)

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        here = self.surroundings.me.peer.host
        self._silence.follow([m for m in watched if m.peer.host != here], self.surroundings.loop.time())
        self._observers.follow(view, watched)
        self._view, self._watched = view, watched

    def heard(self, member_id: str, now: float) -> None:
        for verdict in self._silence.hear(member_id, now):
            if isinstance(verdict, Cleared):
                self._observers.clear(self.surroundings.me.id, member_id)
                self.surroundings.note("cleared", member=member_id)
                self.surroundings.tell(verdict)

    def testified(self, observer: str, member: str, evidence: str | None, now: float) -> None:
        if evidence is None:
            self._observers.clear(observer, member)
        else:
            self._observers.suspect(observer, member, evidence, now)

    def accused(self, observer: str, member: str, evidence: str, now: float) -> None:
        self._observers.report(observer, member, evidence, now)

    def refused(self, member_id: str, now: float) -> None:
        self._suspect(self._silence.doubt(member_id, NOBODY_LISTENS), now)

    def _suspect(self, verdicts: Iterable[Verdict], now: float) -> None:
        for seen in verdicts:
            if isinstance(seen, Suspicion):
                self._observers.suspect(self.surroundings.me.id, seen.member, seen.evidence, now)
                self.surroundings.note("suspected", member=seen.member, evidence=seen.evidence)
                self.surroundings.tell(seen)

    def look(self, now: float) -> None:
        self._suspect(self._silence.look(now), now)
        for verdict in self._observers.look(now):
            match verdict:
                case CutOff(evidence):
                    self.surroundings.note("cut_off", evidence=evidence)
                    self.surroundings.stop(evidence)
                case Resign(evidence):
                    self.surroundings.note("resigned", evidence=evidence)
                    self.surroundings.resign(evidence)
                case Condemned(member, evidence):
                    self.surroundings.note("condemned", member=member, evidence=evidence)
                    self._condemn(member, evidence)
        self.doubtful = self._silence.somebody_is_silent or self._observers.in_doubt

    def _condemn(self, member: str, evidence: str) -> None:
        """One of this host can be ended for certain; of another it has to be taken for gone. So has who listens no
        more: it has left, and may be about to join again while this process still has to learn that both were evicted.
        """
        if self._host_of(member) == self.surroundings.me.peer.host and not evidence.endswith(NOBODY_LISTENS):
            self.surroundings.tell(Stalled(member, evidence))
        else:
            self.surroundings.tell(ProvenDeaths((Death(member, evidence),)))

    def _host_of(self, member: str) -> str | None:
        rank = self._view.rank_of(member) if self._view is not None else None
        if self._view is not None and rank is not None:
            return self._view.members[rank].peer.host
        return next((m.peer.host for m in self._watched if m.id == member), None)
