"""Communicators of one process, one an epoch, as a session makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from holdfast.comms import Communicator
from holdfast.comms.connect import KnownMembers, connect_members


class Epochs:
    """Makes the communicators of the processes that are the ranks of `outer`; their store is in `folder`."""

    def __init__(self, backend: str, outer: Communicator, folder: Path) -> None:
        self.me = outer.rank
        self._backend, self._peers = backend, outer.peers
        self._store = dist.FileStore(str(folder / "store"), -1)

    def next(
        self,
        epoch: int,
        processes: Sequence[int],
        previous: Communicator | None,
        *,
        alone: bool = False,
        timeout: float = 20.0,
        connect_payload: Sequence[int] = (),
    ) -> Communicator:
        """The communicator of these processes, in this order; aborts the previous one.

        `alone`: no other process sees its store.
        """
        if previous is not None:
            previous.abort("the epoch is over")
        return connect_members(
            self._backend,
            KnownMembers(
                rank=list(processes).index(self.me),
                peers=[self._peers[process] for process in processes],
                store=dist.HashStore() if alone else dist.PrefixStore(str(epoch), self._store),
                epoch=epoch,
                previous=previous,
                connect_payload=connect_payload,
            ),
            timeout=timeout,
        )
