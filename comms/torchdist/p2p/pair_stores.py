"""`PairStores`: where the two ranks of a channel meet: a store in the receiver's process, and in no other.

The ranks exchange their stores' addresses when the group begins. So a living pair can connect after other deaths: the
group's own store, which often ends with rank 0, is not asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.rendezvous import tcp
from holdfast.comms.rendezvous.meeting_store import MeetingStore
from holdfast.comms.rendezvous.seal import Seal
from holdfast.comms.system.keys import job_key


@dataclass(frozen=True, slots=True)
class ChannelRanks:
    """The group ranks of a channel's sender and receiver, which name it."""

    src: int
    dst: int

    @property
    def name(self) -> str:
        return f"p2p-{self.src}-{self.dst}"


class PairStores:
    """The stores of one rank's channels; collective over the group. `timeout` (seconds) bounds each of their calls."""

    def __init__(self, group: Communicator, timeout: float) -> None:
        self._rank, self._timeout, self._key = group.rank, timeout, job_key()
        self._own: dist.TCPStore | None = None
        self._places: list[tuple[str, int, str]] = []
        if group.size > 1:
            address = tcp.address_for(group.peers)
            self._own = tcp.serve(address, 0, timeout)
            # The scope is new for each group of a process: its keys are those of no group before.
            self._places = group.all_gather_object((address, self._own.port, secrets.token_hex(8)), timeout)

    def of_channel(self, ranks: ChannelRanks, check_abort: Callable[[], None] = lambda: None) -> MeetingStore:
        """The store of one channel; a sender connects to it. `check_abort`, which may raise, runs during each call.

        Raises `StoreSilent`, and `StoreLost` from its calls, which name the receiver.
        """
        host, port, scope = self._places[ranks.dst]
        where = f"{host}:{port}"
        own = ranks.dst == self._rank
        store = self._own if own else tcp.dial(host, port, self._timeout, ranks.dst, check_abort)
        if store is None:
            raise HoldfastError("the group has ended")
        prefix = f"{scope}/{ranks.name}"
        return MeetingStore(
            store,
            prefix,
            where=where,
            timeout=self._timeout,
            seal=None if self._key is None else Seal(self._key, prefix.encode()),
            serving_rank=ranks.dst,
            check_abort=check_abort,
        )

    def close(self) -> None:
        """End this process's store, unless another group uses it."""
        self._own = None
