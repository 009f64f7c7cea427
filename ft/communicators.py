"""The communicators of a session: one for each epoch, which reuses resources of the one before.

Old communicators are closed after recovery, not during it: the next one may reuse what they hold, and closing takes
time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.comms.errors import HoldfastError, describe
from holdfast.comms.executor import OpSettings
from holdfast.comms.ops import Recorder
from holdfast.ft.listen_address import split_address
from holdfast.ft.membership.view import View
from holdfast.ft.settings import Settings
from holdfast.ft.step_protocol import FIELDS, Vote

if TYPE_CHECKING:
    from holdfast.comms.torchdist.registration import SessionProcessGroup

_log = logging.getLogger("holdfast.ft")


class CommunicatorManager:
    """`comm` is the communicator of the current epoch; None before the first and during a rebuild."""

    def __init__(self, settings: Settings) -> None:
        self.comm: Communicator | None = None
        self.lasting: Communicator | None = None
        """The one that the death of a member does not end, if it was asked for in this epoch."""
        self._settings = settings
        self._retired: list[Communicator] = []

    def retire(self) -> None:
        """Set the current communicator aside: its epoch is over."""
        if self.lasting is not None:
            self.lasting.abort("the members build another communicator")
            self._retired.append(self.lasting)
            self.lasting = None
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
            KnownMembers(
                rank=rank,
                peers=[member.peer for member in view.members],
                store=store,
                epoch=view.epoch,
                name=view.job.name,
                previous=self._retired[-1] if self._retired else None,
                connect_payload=connect_payload,
                address=split_address(view.members[rank].address)[0],
            ),
            device=self._settings.device,
            timeout=timeout,
            over=over,
            settings=OpSettings(self._settings.timeouts.operation, recorder=recorder),
        )
        return self.comm

    def make_lasting(self) -> Communicator:
        """Make `lasting`; collective. Raises what `Communicator.split` raises."""
        if self.comm is None:
            raise HoldfastError("there is no communicator before the first attempt")
        self.lasting = self.comm.split(range(self.comm.size), lasting=True)
        return self.lasting

    def close_retired(self, keep: int = 0) -> None:
        """Close all retired communicators but the newest `keep`. Call it only when no rank waits for the next one."""
        while len(self._retired) > keep:
            _close(self._retired.pop(0))

    def close(self) -> None:
        """Close all communicators. Idempotent."""
        self.retire()
        self.close_retired()


class DefaultGroup:
    """torch.distributed's default group in a session: made at the first use in each epoch."""

    def __init__(self) -> None:
        self._group: SessionProcessGroup | None = None

    def over(self, comm: Communicator, store: dist.Store, timeout: float) -> SessionProcessGroup:
        """The group over `comm`; its subgroups meet at `store`. `timeout` (seconds) is that of its ops.

        Raises HoldfastError if torch has another default group in this process.
        """
        from holdfast.comms.torchdist.registration import install_default_group

        if self._group is None or self._group.communicator is not comm:
            self.drop()
            self._group = install_default_group(comm, dist.PrefixStore("torch", store), timeout)
        return self._group

    def drop(self) -> None:
        """Take the group from torch: its epoch is over. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            from holdfast.comms.torchdist.registration import remove_default_group

            remove_default_group(group)


def collect_votes(comm: Communicator, mine: Vote, timeout: float) -> list[Vote]:
    """Every rank's vote on the open step, in rank order; collective.

    Needs no op if the votes came with the connections, as `connect_payloads`.
    """
    numbers: Sequence[Sequence[int]] | None = comm.connect_payloads
    if numbers is None:
        votes = torch.zeros(comm.size, FIELDS, dtype=torch.int64, device=comm.device)
        comm.all_gather_single(votes, torch.tensor([mine.numbers()], device=comm.device), timeout=timeout)
        numbers = votes.tolist()
    return [Vote.of(vote) for vote in numbers]


def _close(comm: Communicator) -> None:
    try:
        comm.close()
    except Exception as error:  # the others are closed all the same
        _log.warning("the communicator of epoch %d could not be closed: %s", comm.epoch, describe(error))
