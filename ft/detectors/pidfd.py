"""`pidfd`: the kernel reports the end of the processes of this host."""

from __future__ import annotations

from holdfast.ft.detectors.detector import Detector, DetectorContext
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
