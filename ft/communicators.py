"""The communicators of a session, one for each epoch, each built on what is good of the one before.

One that is over is closed late: the next may keep what it holds, and nobody has the time for it who is rebuilding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import connect_members
from holdfast.comms.errors import HoldfastError
from holdfast.comms.journal import Recorder
from holdfast.ft.membership.view import View
from holdfast.ft.settings import Settings

_log = logging.getLogger("holdfast.ft")


class CommunicatorManager:
    """`comm` is the communicator of the epoch at hand; None before the first, and while there is none."""

    def __init__(self, settings: Settings) -> None:
        self.comm: Communicator | None = None
        self._settings = settings
        self._retired: list[Communicator] = []

    def retire(self) -> None:
        """The communicator at hand is over."""
        if self.comm is not None:
            self._retired.append(self.comm)
            self.comm = None

    def connect(
        self,
        view: View,
        rank: int,
        store: dist.Store,
        timeout: float,
        over: Callable[[], HoldfastError | None],
        recorder: Recorder | None,
        connect_payload: Sequence[int],
    ) -> Communicator:
        """Connect the members of `view`, this process as `rank`. Raises what `connect_members` raises."""
        self.close_retired(keep=1)
        self.comm = connect_members(
            view.job.backend,
            rank=rank,
            size=len(view.members),
            store=store,
            peers=[member.peer for member in view.members],
            epoch=view.epoch,
            name=view.job.name,
            device=self._settings.device,
            timeout=timeout,
            op_timeout=self._settings.timeouts.operation,
            over=over,
            recorder=recorder,
            previous=self._retired[-1] if self._retired else None,
            connect_payload=connect_payload,
        )
        return self.comm

    def close_retired(self, keep: int = 0) -> None:
        """Close those that are over, but for the newest `keep`. To be called where nobody waits for the next one."""
        while len(self._retired) > keep:
            _close(self._retired.pop(0))

    def close(self) -> None:
        """Close all of them. Idempotent."""
        self.retire()
        self.close_retired()


def _close(comm: Communicator) -> None:
    try:
        comm.close()
    except HoldfastError as error:
        _log.warning("the communicator of epoch %d could not be closed: %s", comm.epoch, error)
