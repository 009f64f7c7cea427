"""Communicators that tests connect by hand: of ranks that are threads, and one an epoch as a session does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import Communicator
from holdfast.comms.connect import KnownMembers, connect_members
from holdfast.harness import LocalCluster
from support.waiting import eventually

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


def alone(path: Path, backend: str = "shm", **named: Any) -> Communicator:
    """A communicator of this process as its only rank, which meets in the folder `path`."""
    return comms.connect(backend, rank=0, size=1, rendezvous=f"file://{path}/meeting", **named)


@contextmanager
def registered(plugin: object) -> Iterator[None]:
    """Within it, this process has the plugin."""
    comms.register(plugin)
    try:
        yield
    finally:
        comms.unregister(plugin)


class Epochs:
    """One process, a rank of `outer`, in epoch after epoch; keeps its communicators. The store is in `folder`."""

    def __init__(self, backend: str, outer: Communicator, folder: Path) -> None:
        self.me = outer.rank
        self.comm: Communicator | None = None
        self._backend, self._peers, self._folder = backend, outer.peers, folder
        self._store = dist.FileStore(str(folder / "store"), -1)
        self._old: list[Communicator] = []
        self._barriers = 0

    def enter(
        self,
        epoch: int,
        processes: Sequence[int],
        *,
        alone: bool = False,
        anew: bool = False,
        timeout: float = 20.0,
    ) -> Communicator:
        """Take part in an epoch as one of these processes, in this order; aborts the communicator before.

        `alone`: no other process sees the store. `anew`: the communicator gets nothing from the one before.
        """
        previous = self.comm or (self._old[-1] if self._old else None)
        if self.comm is not None:
            self.comm.abort("the epoch is over")
            self._old.append(self.comm)
            self.comm = None
        self._barriers = 0
        self.comm = connect_members(
            self._backend,
            KnownMembers(
                rank=list(processes).index(self.me),
                peers=[self._peers[process] for process in processes],
                store=dist.HashStore() if alone else dist.PrefixStore(str(epoch), self._store),
                epoch=epoch,
                previous=None if anew else previous,
                connect_payload=(epoch, self.me, -1, 0),  # as many as a board has room for
            ),
            timeout=timeout,
        )
        return self.comm

    def leave_barrier(self, comm: Communicator) -> None:
        """Enter a barrier, and return once all ranks have left it: a link that breaks then ends no op."""
        comm.barrier()
        self._barriers += 1
        self.meet(f"barrier {self._barriers} of epoch {comm.epoch}", comm.size)

    def meet(self, where: str, count: int) -> None:
        """Wait until so many processes are there, without a communicator."""
        at = self._folder / where
        at.mkdir(exist_ok=True)
        (at / str(self.me)).touch()
        eventually(lambda: len(list(at.iterdir())) == count)

    def close_old(self) -> None:
        """Close all communicators but the newest."""
        while self._old:
            self._old.pop(0).close()

    def close(self) -> None:
        self.close_old()
        if self.comm is not None:
            self.comm.close()


def in_epochs(
    cluster: LocalCluster, body: Callable[[Epochs], T], folder: Path, size: int | None = None
) -> list[T | None]:
    """The results of `body` in each process of a cluster, or in the first `size`; closes their communicators."""

    def whole(outer: Communicator) -> T | None:
        epochs = Epochs(outer.backend, outer, folder)
        try:
            return body(epochs) if size is None or outer.rank < size else None
        finally:
            outer.barrier()
            epochs.close()

    return cluster.run(whole)[:size]
