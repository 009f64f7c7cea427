"""Communicators that tests connect by hand: of ranks that are threads, and one an epoch as a session does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import Communicator
from holdfast.comms.connect import KnownMembers, connect_members

T = TypeVar("T")


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Call `body(rank)` in a thread each; results or exceptions by rank."""

    def run(rank: int) -> Any:
        try:
            return body(rank)
        except Exception as error:
            return error

    return run_in_threads(size, run, None)


def run_in_threads(size: int, body: Callable[[int], T], timeout: float | None) -> list[T]:
    """Call `body(rank)` in a thread for each rank; the results by rank. Raises the first error, or `TimeoutError`."""
    threads = ThreadPoolExecutor(size, "rank")
    try:
        return list(threads.map(body, range(size), timeout=timeout))
    finally:
        threads.shutdown(wait=False)


def total(comm: comms.Communicator) -> float:
    tensor = torch.tensor([float(comm.rank + 1)])
    with comm:
        comm.all_reduce(tensor)
    return tensor.item()


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
