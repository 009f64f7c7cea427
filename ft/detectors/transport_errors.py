"""`transport`: what a backend says about its peers. Its communicator is over, so something has to follow from it."""

from __future__ import annotations

from holdfast.comms.errors import HoldfastError, PeerFailed
from holdfast.ft.detectors.detector import Detector
from holdfast.ft.membership.view import View


class Transport(Detector):
    """Turns a `PeerFailed` of this process's communicator into an accusation before all."""

    def failed(self, view: View, failure: HoldfastError, now: float) -> None:
        if not isinstance(failure, PeerFailed):
            return
        for rank in failure.ranks:
            if 0 <= rank < len(view.members) and view.members[rank].id != self.surroundings.me.id:
                evidence = f"the {view.job.backend} of {self.surroundings.me.id} says: {failure.evidence}"
                self.surroundings.accuse(view.members[rank].id, evidence)
