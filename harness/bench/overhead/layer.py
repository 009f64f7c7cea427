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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from holdfast.comms.errors import Unsupported
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.overhead.blocks import Way, agreed_block, block_times, slowest
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.show import figures, others

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
    """The cost of each way."""
    times_of = slowest(by_rank)
    for way, times in zip(WAYS[backend], times_of, strict=True):
        pairs = list(zip(times, times_of[0], strict=True))
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
        ways: tuple[Way, ...] = (*others, partial(comm.all_reduce, tensor))
        for way in ways:
            _check(comm, way, tensor)
        block = agreed_block(comm, ways[0], _BLOCK_SECONDS, _MOST_OPS)
        return block_times(ways, rounds, block, line_up=comm.barrier)


def _check(comm: Communicator, way: Way, tensor: torch.Tensor) -> None:
    """Check that a way reduces its input. Leaves zeros in `tensor`: any number of sums of zeros are zeros."""
    tensor.fill_(comm.rank + 1)
    way()
    if not bool((tensor == comm.size * (comm.size + 1) // 2).all()):
        raise ArithmeticError(f"an all_reduce over {comm.backend} gave {tensor}")
    tensor.zero_()


@contextmanager
def _gloo(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(meeting, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        group: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        tensors, options = [tensor], dist.AllreduceOptions()
        yield lambda: group.allreduce(tensors, options).wait(), partial(dist.all_reduce, tensor)
    finally:
        dist.destroy_process_group()


@contextmanager
def _mpi(comm: Communicator, meeting: str, tensor: torch.Tensor) -> Iterator[tuple[Way, ...]]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    try:
        place, buffer, add = MPI.IN_PLACE, [tensor.numpy(), tensor.numel(), MPI.FLOAT], MPI.SUM
        yield (lambda: world.Allreduce(place, buffer, add),)
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

    def way() -> object:
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


def show(cost: LayerCost, out: Console) -> None:
    """Print the costs."""
    table = figures(
        f"all_reduce over {cost.backend}, {counted(cost.ranks, 'rank')}",
        ("size", "way", "median", "least", "more", "speed"),
        names=("way",),
        caption=f"a call, median and least; beside the first; {others(cost.others)}",
    )
    for call in cost.calls:
        table.add_row(
            format_bytes(call.nbytes), call.way, f"{call.us:.2f} us", f"{call.least_us:.2f} us",
            f"{call.extra_us:+.2f} us", f"x{call.speed:.3f}",
        )  # fmt: skip
    out.print(table)
