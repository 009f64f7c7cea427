"""When does a quantised all_reduce (fp8, error feedback) pay? `python docs/experiments/quantised.py`.

Both take turns in the same processes, on the same float32 tensor. Bytes are counted by running the algorithms of
messages between threads, as they run over ucx, mpi and gloo; shm copies from memory to memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.ft.console.console import print_json
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.collectives.counting import count_traffic
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.noise import Noise

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
    import torch

    from holdfast.comms.quantised import ErrorFeedback, all_reduce_quantised

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


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="shm,gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20, 16 << 20, 64 << 20], help="bytes of float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    print_json(run(asked.backends.split(","), asked.sizes, asked.ranks, asked.rounds))


if __name__ == "__main__":
    main()
