"""Counts the messages and bytes that the algorithms send, by running them over queues between threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms import HoldfastError, ReduceOp
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.quantised import Contribution, reduce_quantised
from holdfast.comms.transport.base import Context, Link
from holdfast.comms.transport.liveness import this_process

T = TypeVar("T")


def run_in_threads(size: int, body: Callable[[int], T], timeout: float) -> list[T]:
    """Call `body(rank)` in a thread for each rank; returns the results in rank order. Raises the first error.

    Raises RunTimeout if ranks without an error are not done after `timeout` seconds: their threads stay behind.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"holdfast-rank-{rank}", daemon=True) for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank in range(size) if rank not in results]
    if late:
        from holdfast.harness.cluster.errors import RunTimeout  # no sooner: it would count in measurements of memory

        raise RunTimeout(late, timeout, "")
    return [results[rank] for rank in range(size)]


Tensor = torch.Tensor
Address = tuple[int, int, int]
"""Sender, receiver, tag."""

LINK = Link(latency=2e-6, bandwidth=5e9)
"""What the choice of algorithm assumes: a fixed network, so that counts depend on nothing else."""
SECONDS = 60.0


class SentTraffic(msgspec.Struct, frozen=True):
    """What one rank sent in one op."""

    messages: int
    nbytes: int


class Mail:
    """A queue for each address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Address, queue.Queue[Tensor]] = {}

    def __getitem__(self, address: Address) -> queue.Queue[Tensor]:
        with self._lock:
            return self._queues.setdefault(address, queue.Queue())


class CountingTransport(MessageTransport):
    """Sends messages through queues within one process, and counts them."""

    def __init__(self, context: Context, mail: Mail) -> None:
        super().__init__(context, LINK)
        self._mail = mail
        self.messages = self.nbytes = 0

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Posted:
        self.messages += 1
        self.nbytes += tensor.nbytes
        self._mail[self.rank, dst, tag].put(tensor.detach().clone())
        return None

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Posted:
        return tensor, self._mail[src, self.rank, tag]

    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        for each in posted:
            if isinstance(each, tuple):
                into, source = each
                into.view(-1).copy_(source.get(timeout=max(deadline - time.monotonic(), 0.01)).view(-1))

    def abort(self, error: HoldfastError) -> None:
        """Do nothing: each op waits at most until its deadline."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _run(transport: CountingTransport, op: str, nbytes: int, ranks: int) -> None:
    deadline, count = time.monotonic() + SECONDS, max(1, nbytes // 4)
    each = max(1, count // ranks)
    whole = torch.ones(each * ranks)
    parts = list(torch.zeros(each * ranks).chunk(ranks))
    match op:
        case "all_reduce":
            transport.all_reduce(torch.ones(count), ReduceOp.SUM, deadline)
        case "all_reduce_quantised":
            reduce_quantised(transport, Contribution(torch.ones(count), None), None, 1, deadline)
        case "broadcast":
            transport.broadcast(torch.ones(count), 0, deadline)
        case "all_gather":
            transport.all_gather(parts, torch.ones(each), deadline)
        case "all_to_all":
            transport.all_to_all(parts, list(whole.chunk(ranks)), deadline)
        case _:
            raise ValueError(f"{op} is not counted")


def count_traffic(op: str, ranks: int, nbytes: int) -> list[SentTraffic]:
    """The traffic of each rank in one `op` of size `nbytes`, as the bench counts sizes. Raises the first error."""
    mail, store = Mail(), dist.HashStore()

    def counted(rank: int) -> SentTraffic:
        context = Context(
            rank=rank,
            size=ranks,
            name="count",
            epoch=0,
            device=torch.device("cpu"),
            store=store,
            peers=(this_process(),) * ranks,
            deadline=time.monotonic() + SECONDS,
        )
        transport = CountingTransport(context, mail)
        _run(transport, op, nbytes, ranks)
        return SentTraffic(transport.messages, transport.nbytes)

    return run_in_threads(ranks, counted, 2 * SECONDS)
