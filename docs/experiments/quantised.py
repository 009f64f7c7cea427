"""When does a quantised all_reduce (fp8, error feedback) pay? `python docs/experiments/quantised.py`.

Both take turns in the same processes, on the same float32 tensor. Bytes are counted by running the algorithms of
messages between threads, as they run over ucx, mpi and gloo; shm copies from memory to memory. `--traffic` counts the
messages and bytes of the other ops too, and measures nothing.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from holdfast.comms import HoldfastError, ReduceOp
from holdfast.comms.algorithms.message_passing.exchange import Posted
from holdfast.comms.algorithms.message_passing.messages import MessageTransport
from holdfast.comms.quantised import Contribution, ErrorFeedback, all_reduce_quantised, reduce_quantised
from holdfast.comms.transport.base import Context, Link
from holdfast.comms.transport.liveness import this_process
from holdfast.ft.console.console import print_json
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.results import Noise

if TYPE_CHECKING:
    from holdfast.comms import Communicator


class QuantisedCost(msgspec.Struct, frozen=True):
    """An all_reduce of `nbytes` over a backend, plain and quantised.

    Times are medians in ms, of the slowest rank; bytes are the most of a rank. `speed` is the median over the rounds of
    plain over quantised time, `error` the largest error that was seen, over the bound.
    """

    backend: str
    ranks: int
    nbytes: int
    plain_ms: float
    quantised_ms: float
    speed: float
    plain_bytes: int
    quantised_bytes: int
    error: float


class QuantisedBench(msgspec.Struct, frozen=True):
    """A whole run. `others`: CPUs that other processes used meanwhile."""

    costs: tuple[QuantisedCost, ...]
    others: float


def run(backends: Sequence[str], sizes: Sequence[int], ranks: int, rounds: int) -> QuantisedBench:
    """Measure every size over every backend. Raises the errors of `LocalCluster`."""
    noise, costs = Noise(zygote_pid), list[QuantisedCost]()
    for backend in backends:
        with LocalCluster(ranks, backend, threads=1, echo=False, timeout=300.0) as cluster:
            for nbytes in sizes:
                found = cluster.run(_take_turns, max(1, nbytes // 4), rounds)
                costs.append(_cost(backend, nbytes, [times for times, _ in found], max(error for _, error in found)))
    return QuantisedBench(tuple(costs), noise.cpus())


def _cost(backend: str, nbytes: int, by_rank: Sequence[Sequence[tuple[float, float]]], error: float) -> QuantisedCost:
    plain, quantised = (
        [max(times[way] for times in ranks) for ranks in zip(*by_rank, strict=True)] for way in range(2)
    )
    plain_bytes, quantised_bytes = (
        max(each.nbytes for each in count_traffic(op, len(by_rank), nbytes))
        for op in ("all_reduce", "all_reduce_quantised")
    )
    return QuantisedCost(
        backend,
        len(by_rank),
        nbytes,
        statistics.median(plain) * 1e3,
        statistics.median(quantised) * 1e3,
        statistics.median(one / other for one, other in zip(plain, quantised, strict=True)),
        plain_bytes,
        quantised_bytes,
        error,
    )


def _take_turns(comm: Communicator, count: int, rounds: int) -> tuple[list[tuple[float, float]], float]:
    """Seconds of the plain and of the quantised op in each round, and the first error over its bound."""
    given = torch.randn(count, generator=torch.Generator().manual_seed(comm.rank))
    bound = given.abs().max().view(1)
    comm.all_reduce(bound)
    feedback, times, error = ErrorFeedback(), list[tuple[float, float]](), 0.0
    for turn in range(rounds + 2):
        plain, quantised = given.clone(), given.clone()
        began = _together(comm)
        comm.all_reduce(plain)
        between = time.perf_counter(), _together(comm)
        all_reduce_quantised(comm, quantised, feedback)
        times.append((between[0] - began, time.perf_counter() - between[1]))
        if turn == 0:
            error = float((plain - quantised).abs().max() / (0.13 * bound))
    return times[2:], error


def _together(comm: Communicator) -> float:
    comm.barrier()
    return time.perf_counter()


# What is sent ---------------------------------------------------------------------------------------------------------

Tensor = torch.Tensor
Address = tuple[int, int, int]
"""Sender, receiver, tag."""

LINK = Link(latency=2e-6, bandwidth=5e9)
"""What the choice of algorithm assumes: a fixed network, so that counts depend on nothing else."""
SECONDS = 60.0
COUNTED = ("all_reduce", "all_reduce_quantised", "broadcast", "all_gather", "all_to_all")


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
            ones = torch.ones(count)
            reduce_quantised(transport, ones, Contribution(ones, None), None, 1, deadline)
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

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(counted, range(ranks)))


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="shm,gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 16 << 20, 64 << 20], help="bytes of float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--traffic", nargs="*", choices=COUNTED, help="count what these ops send, at each size")
    asked = parser.parse_args()
    if asked.traffic:
        print_json({op: {size: count_traffic(op, asked.ranks, size) for size in asked.sizes} for op in asked.traffic})
        return
    print_json(run(asked.backends.split(","), asked.sizes, asked.ranks, asked.rounds))


if __name__ == "__main__":
    main()
