"""`pidfd`: the kernel reports the end of the processes of this host. Where it may not, looks at them find it."""

from __future__ import annotations

from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.process_watch import death_of
from holdfast.ft.membership.events import ProvenDeaths
from holdfast.ft.membership.view import Member, View


class PidfdDetector(Detector):
    """Proves deaths within milliseconds. Can also fence."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._watch = context.processes.watch(lambda deaths: context.tell(ProvenDeaths(deaths)))

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._watch.follow(watched)

    def fence(self, member: Member) -> bool:
        return self._watch.fence(member)

    def close(self) -> None:
        self._watch.close()


class LookingDetector(Detector):
    """Proves deaths within a heartbeat, with nothing of the kernel's that can be forbidden."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._mates: dict[str, Member] = {}
        self._gone: set[str] = set()

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._mates = self.context.mates(watched)
        self._gone &= self._mates.keys()

    def look(self, now: float) -> None:
        ended = [m for m in self._mates.values() if m.id not in self._gone and self.context.processes.is_gone(m.peer)]
        self._gone |= {member.id for member in ended}
        if ended:
            self.context.tell(ProvenDeaths(tuple(map(death_of, ended))))
