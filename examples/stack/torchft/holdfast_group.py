"""`ProcessGroupHoldfast`: what `torchft.ProcessGroupGloo` is, over a transport of holdfast's.

torchft's Manager configures it anew for each quorum. An op whose peer died raises `PeerFailed` at once, and the Manager
discards the step.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from holdfast.comms import connect
from holdfast.comms.rendezvous.meeting_place import SharedByRuns
from holdfast.comms.torchdist.process_group import HoldfastProcessGroup, resolve_options


class ProcessGroupHoldfast(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types
    """`timeout` bounds each `configure`, and each op. HOLDFAST_BACKEND names the transport."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._options = resolve_options(None, None)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> HoldfastProcessGroup:
        """Connect the members of a quorum, through its part of the store."""
        seconds = self._timeout.total_seconds()
        communicator = connect(
            self._options.backend,
            rank=rank,
            size=world_size,
            rendezvous=SharedByRuns("holdfast", store),
            name=f"torchft-{self._quorum_id}-{self._group_rank}",
            device=torch.device(self._options.device),
            timeout=seconds,
        )
        return HoldfastProcessGroup(store, communicator, self._options, seconds)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "torchft-holdfast"

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()
