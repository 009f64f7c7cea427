"""`holdfast bench layer`: what holdfast adds to a call of another library's transport.

For nccl that is one rank, and the time of the host: a call returns once the op is queued. Where there is no GPU, a
group of torch that does nothing stands in for NCCL, and the rest of the path is the same.

The same all_reduce of the same ranks, called in three ways that take turns in the same processes: on the library's own
object, with everything prepared beforehand; as the library's users call it, which for gloo is
`torch.distributed.all_reduce`; and through holdfast. Each has connections of its own, of the same kind.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.comms.errors import Unsupported
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.noise import Noise

if TYPE_CHECKING:
    import torch

    from holdfast.comms import Communicator

HOLDFAST = "holdfast"
STAND_IN = "nccl-stand-in"
"""A backend of a plugin that is registered here by hand: nothing imports a backend."""
WAYS = {
    "gloo": ("ProcessGroupGloo.allreduce", "torch.distributed.all_reduce", HOLDFAST),
    "mpi": ("MPI.Comm.Allreduce", HOLDFAST),
    "nccl": ("ProcessGroupNCCL.allreduce", HOLDFAST),
    STAND_IN: ("FakeProcessGroup.allreduce", HOLDFAST),
}
"""By backend, the ways to call. The others are compared with the first."""

_BLOCK_SECONDS = 0.005
_MOST_OPS = 2_000

Way = Callable[["torch.Tensor"], object]


class CallCost(msgspec.Struct, frozen=True):
    """An all_reduce of `nbytes` bytes, called in one `way`: microseconds a call, the median and the least over rounds.

    `extra_us` is the difference to the first way in the same round, `speed` the ratio (medians).
    """

    nbytes: int
    way: str
    us: float
    least_us: float
    extra_us: float
    speed: float


class LayerCost(msgspec.Struct, frozen=True):
    """A whole run. `others`: CPUs that other processes used meanwhile."""

    backend: str
    ranks: int
    calls: tuple[CallCost, ...]
    others: float


def run(
    backend: str,
    sizes: Sequence[int],
    ranks: int = 2,
    rounds: int = 60,
    progress: Callable[[str], None] = lambda text: None,
) -> LayerCost:
    """Measure, about a second for each size and ten rounds. Raises `Unsupported` for a backend that is no layer."""
    if backend not in WAYS:
        known = ", ".join(repr(name) for name in WAYS if name != STAND_IN)
        raise Unsupported(f"what holdfast adds over {backend!r}", f"ask for one of {known}")
    noise, calls = Noise(zygote_pid), list[CallCost]()
    if backend == STAND_IN:
        for nbytes in sizes:
            progress(f"{backend}, {nbytes} B")
            with _one_stand_in() as comm:
                calls += _costs(backend, nbytes, [_take_turns(comm, backend, "", max(1, nbytes // 4), rounds)])
        return LayerCost(backend, 1, tuple(calls), noise.cpus())
    ranks, device = (1, "cuda") if backend == "nccl" else (ranks, None)
    options: Any = {"environ": {"HOLDFAST_CHECK": "0"}, "threads": 1, "echo": False, "timeout": 300.0}
    with LocalCluster(ranks, backend, device=device, **options) as cluster:
        for nbytes in sizes:
            progress(f"{backend}, {nbytes} B")
            meeting = str(cluster.logs / f"layer-{nbytes}")
            calls += _costs(backend, nbytes, cluster.run(_take_turns, backend, meeting, max(1, nbytes // 4), rounds))
    return LayerCost(backend, ranks, tuple(calls), noise.cpus())


def _costs(backend: str, nbytes: int, by_rank: Sequence[Sequence[Sequence[float]]]) -> Iterator[CallCost]:
    """The cost of each way: in each round the time of the slowest rank."""
    slowest = [[max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    for way, times in zip(WAYS[backend], slowest, strict=True):
        pairs = list(zip(times, slowest[0], strict=True))
        yield CallCost(
            nbytes,
            way,
            1e6 * statistics.median(times),
            1e6 * min(times),
            1e6 * statistics.median(ours - direct for ours, direct in pairs),
            statistics.median(direct / ours for ours, direct in pairs),
        )


# What each rank does --------------------------------------------------------------------------------------------------


def _take_turns(comm: Communicator, backend: str, meeting: str, count: int, rounds: int) -> list[list[float]]:
    """By way, the seconds of a call in each round."""
    import torch

    tensor = torch.empty(count, device=comm.device)
    with _OTHERS[backend](comm, meeting, tensor) as others:
        ways: tuple[Way, ...] = (*others, comm.all_reduce)
        for way in ways:
            _check(comm, way, tensor)
        block = _block_size(comm, ways[0], tensor)
        times: list[list[float]] = [[] for _ in ways]
        for turn in range(rounds):
            for place in range(len(ways)):
                number = (turn + place) % len(ways)
                way = ways[number]
                comm.barrier()
                way(tensor)
                began = time.perf_counter()
                for _ in range(block):
                    way(tensor)
                times[number].append((time.perf_counter() - began) / block)
    return times


def _check(comm: Communicator, way: Way, tensor: torch.Tensor) -> None:
    """Check that a way reduces its input. Leaves zeros in `tensor`: any number of sums of zeros are zeros."""
    tensor.fill_(comm.rank + 1)
    way(tensor)
    if not bool((tensor == comm.size * (comm.size + 1) // 2).all()):
        raise ArithmeticError(f"an all_reduce over {comm.backend} gave {tensor}")
    tensor.zero_()


def _block_size(comm: Communicator, way: Way, tensor: torch.Tensor) -> int:
    """How many calls take `_BLOCK_SECONDS`; the same on all ranks."""
    began = time.perf_counter()
    for _ in range(20):
        way(tensor)
    mine = int(_BLOCK_SECONDS / max(1e-7, (time.perf_counter() - began) / 20))
    agreed: int = comm.broadcast_object(max(2, min(_MOST_OPS, mine)), 0)
    return agreed


@contextmanager
def _gloo(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(meeting, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        group: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        tensors, options = [tensor], dist.AllreduceOptions()
        yield lambda _: group.allreduce(tensors, options).wait(), dist.all_reduce
    finally:
        dist.destroy_process_group()


@contextmanager
def _mpi(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    try:
        place, buffer, add = MPI.IN_PLACE, [tensor.numpy(), tensor.numel(), MPI.FLOAT], MPI.SUM
        yield (lambda _: world.Allreduce(place, buffer, add),)
    finally:
        world.Free()


@contextmanager
def _nccl(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    """torch's own group, on the caller's stream as ours."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.FileStore(meeting, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        group: Any = dist.distributed_c10d._get_default_group()._get_backend(tensor.device)
        yield (_queued_by(group, tensor),)
    finally:
        dist.destroy_process_group()


@contextmanager
def _stand_in(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    yield (_queued_by(importlib.import_module(_PLUGIN).OneRank(), tensor),)


def _queued_by(group: Any, tensor: torch.Tensor) -> Way:
    import torch.distributed as dist

    tensors, options = [tensor], dist.AllreduceOptions()
    options.asyncOp = False

    def way(_: torch.Tensor) -> object:
        work = group.allreduce(tensors, options)
        return None if work is None else work.wait()

    return way


@contextmanager
def _one_stand_in() -> Iterator[Communicator]:
    import torch.distributed as dist

    from holdfast import comms

    plugin = importlib.import_module(_PLUGIN)
    comms.register(plugin)
    try:
        with comms.connect(STAND_IN, rank=0, size=1, rendezvous=dist.HashStore()) as comm:
            yield comm
    finally:
        comms.unregister(plugin)


_PLUGIN = "holdfast.backends.nccl.stand_in"
_OTHERS = {"gloo": _gloo, "mpi": _mpi, "nccl": _nccl, STAND_IN: _stand_in}


def table(cost: LayerCost) -> str:
    """The costs as a table for the terminal."""
    lines = [
        f"all_reduce over {cost.backend}, {counted(cost.ranks, 'rank')}, us a call: median, least; beside the first"
    ]
    lines += [
        f"  {format_bytes(call.nbytes):>8}  {call.way:30} {call.us:10.2f} {call.least_us:10.2f}"
        f"  {call.extra_us:+9.2f} us  x{call.speed:.3f}"
        for call in cost.calls
    ]
    return "\n".join([*lines, f"other processes used {cost.others:.2f} CPUs meanwhile"])
