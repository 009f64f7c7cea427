"""`transport`: reports peers that a backend found to have failed. The epoch is over then, so a new view must follow."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError, PeerFailed
from holdfast.ft.detectors.detector import Detector
from holdfast.ft.membership.view import View


class TransportErrorsDetector(Detector):
    """Turns a `PeerFailed` of this process's communicator into a suspicion that all processes receive."""

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        if not isinstance(failure, PeerFailed):
            return
        for rank in failure.ranks:
            if 0 <= rank < len(view.members) and view.members[rank].id != self.context.me.id:
                evidence = f"the {view.job.backend} of {self.context.me.id} says: {failure.evidence}"
                self.context.suspect(view.members[rank].id, evidence)
