"""Communicators in this process alone, for what needs no other: counting what a call executes, or how much it takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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


def in_threads(ranks: int, body: Callable[[Communicator], object]) -> None:
    """`body(communicator)` on every rank, each a thread. Raises the first error."""
    import torch.distributed as dist

    from holdfast import comms

    store, errors = dist.HashStore(), list[BaseException]()

    def rank(number: int) -> None:
        try:
            with comms.connect("inproc", rank=number, size=ranks, rendezvous=store, timeout=SECONDS) as comm:
                body(comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
