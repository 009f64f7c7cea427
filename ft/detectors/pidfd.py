"""`pidfd`: reports the end of processes of this host, from the kernel."""

from __future__ import annotations

from holdfast.ft.detectors.detector import Detector, DetectorContext
from holdfast.ft.detectors.process_watch import ProcessWatch
from holdfast.ft.membership.events import ProvenDeaths
from holdfast.ft.membership.view import Member, View


class PidfdDetector(Detector):
    """Proves deaths within milliseconds. Can also fence."""

    def __init__(self, context: DetectorContext) -> None:
        super().__init__(context)
        self._processes = ProcessWatch(lambda deaths: context.tell(ProvenDeaths(deaths)))

    def follow(self, view: View | None, watched: tuple[Member, ...]) -> None:
        self._processes.follow(watched)

    def fence(self, member: Member) -> bool:
        return self._processes.fence(member)

    def close(self) -> None:
        self._processes.close()
