"""Communicators within this process alone, to count what a call executes and how much memory it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.harness.cluster import run_in_threads as threads

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

SECONDS = 60.0


@contextlib.contextmanager
def one_rank() -> Iterator[Communicator]:
    """A communicator of one rank."""
    import torch.distributed as dist

    from holdfast import comms

    with comms.connect("inproc", rank=0, size=1, rendezvous=dist.HashStore(), timeout=SECONDS) as comm:
        yield comm


def run_connected_ranks(ranks: int, body: Callable[[Communicator], object]) -> None:
    """`body(communicator)` on every rank, each a thread. Raises the first error."""
    import torch.distributed as dist

    from holdfast import comms

    store = dist.HashStore()

    def connected(rank: int) -> None:
        with comms.connect("inproc", rank=rank, size=ranks, rendezvous=store, timeout=SECONDS) as comm:
            body(comm)

    threads.run_in_threads(ranks, connected, 2 * SECONDS)
