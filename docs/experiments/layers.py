"""What does holdfast add to a call of another library? `python docs/experiments/layers.py gloo` (or mpi, nccl).

The same all_reduce of the same ranks, called in two or three ways that take turns in the same processes: on the
library's own object, with everything prepared beforehand; as the library's users call it, which for gloo is
`torch.distributed.all_reduce`; and through holdfast. Each has connections of its own, of the same kind.

For nccl that is one rank, and the time of the host: a call returns once the op is queued. With `--stand-in` a group of
torch that does nothing takes the place of NCCL, and the rest of the path is the same. With `--async-op` each op is
asynchronous, and the time is that of its call and its wait.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.comms import Communicator
from holdfast.comms.system.files import url_of
from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.bench.operations import parse_sizes
from holdfast.harness.cluster.local_cluster import LocalCluster
from holdfast.harness.measure.results import Noise, figures, others
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns

Call = Callable[[], object]
Ways = Mapping[str, Callable[[torch.Tensor], Call]]
"""By its name, what makes the call of a tensor's all_reduce."""

TURN_SECONDS = 0.01
TIMEOUT = 60.0
STAND_IN = "nccl-stand-in"


def _plugin() -> Any:
    """The plugin of that backend, which the tests have."""
    tests = str(Path(__file__).parents[2] / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    return importlib.import_module("support.comms.nccl_stand_in")


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


def run(backend: str, sizes: Sequence[int], ranks: int, rounds: int, async_op: bool = False) -> LayerCost:
    """Measure, about a second for each size and ten rounds. Raises the errors of `LocalCluster`."""
    noise = Noise(zygote_pid)
    alone = backend in ("nccl", STAND_IN)
    quiet = {"HOLDFAST_CHECK": "0"}
    where = "inproc" if alone else backend
    with (
        LocalCluster(1 if alone else ranks, where, threads=1, echo=False, timeout=600.0, environ=quiet) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        by_rank = cluster.run(_measure, backend, list(sizes), rounds, Path(folder), async_op)
    costs = tuple(cost for nbytes in sizes for cost in _costs(nbytes, [rank[nbytes] for rank in by_rank]))
    return LayerCost(backend, len(by_rank), costs, noise.cpus())


def _costs(nbytes: int, by_rank: Sequence[Mapping[str, Sequence[float]]]) -> Iterator[CallCost]:
    """The cost of each way beside that of the first; a round takes as long as on its slowest rank."""
    first: list[float] = []
    for way in by_rank[0]:
        times = [1e6 * max(each) for each in zip(*(rank[way] for rank in by_rank), strict=True)]
        first = first or times
        pairs = list(zip(times, first, strict=True))
        yield CallCost(
            nbytes,
            way,
            statistics.median(times),
            min(times),
            statistics.median(ours - direct for ours, direct in pairs),
            statistics.median(direct / ours for ours, direct in pairs),
        )


# Ranks ----------------------------------------------------------------------------------------------------------------


def _measure(
    comm: Communicator, backend: str, sizes: Sequence[int], rounds: int, folder: Path, async_op: bool
) -> dict[int, dict[str, list[float]]]:
    """The body of a rank: by size and way, the seconds of a call in each round."""
    if backend == STAND_IN:
        comms.register(_plugin())
    device, found = "cuda" if backend == "nccl" else "cpu", {}
    meeting = url_of("file", folder / "meeting")
    with comms.connect(
        backend, rank=comm.rank, size=comm.size, rendezvous=meeting, device=device, timeout=TIMEOUT
    ) as ours:
        ways = _ways(ours, backend, folder, async_op)
        for nbytes in sizes:
            calls = _Calls(comm, torch.empty(max(1, nbytes // 4), device=device), check=backend != STAND_IN)
            turns = take_turns(calls, ways, range(rounds), _raise)
            found[nbytes] = {way: [turn.seconds["call"][0] for turn in each] for way, each in turns.items()}
    return found


class _Calls(Workload[Callable[[torch.Tensor], Call]]):
    """Calls in a row that fill a turn, and the check of one."""

    name = "all_reduce"

    def __init__(self, comm: Communicator, tensor: torch.Tensor, check: bool) -> None:
        self._comm, self._tensor, self._check, self._ops = comm, tensor, check, 0

    def set_up(self, contestant: Callable[[torch.Tensor], Call]) -> None:
        """Warm up and check; the first way says how many calls make a turn."""
        self._tensor.fill_(self._comm.rank + 1.0)
        call = contestant(self._tensor)
        call()
        if self._check and not bool((self._tensor == self._comm.size * (self._comm.size + 1) / 2).all()):
            raise ArithmeticError(f"the sum is {self._tensor}")
        self._tensor.zero_()
        taken = [_timed(call) for _ in range(20)]
        if not self._ops:
            self._ops = self._comm.broadcast_object(max(3, int(TURN_SECONDS / statistics.median(taken))), 0)

    def turn(self, contestant: Callable[[torch.Tensor], Call], number: int) -> TimedTurn:
        call, repeats = contestant(self._tensor), range(self._ops)
        call()
        self._comm.barrier()
        began = time.perf_counter()
        for _ in repeats:
            call()
        return TimedTurn({"call": [(time.perf_counter() - began) / self._ops]}, wrong=None)


def _timed(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _raise(name: str, error: Exception) -> None:
    raise error


def _ways(comm: Communicator, backend: str, folder: Path, async_op: bool) -> Ways:
    """The ways to call a backend's library; the others are compared with the first."""
    ours = (
        {"holdfast": lambda tensor: _awaited(partial(comm.all_reduce, tensor, async_op=True))}
        if async_op
        else {"holdfast": lambda tensor: partial(comm.all_reduce, tensor)}
    )
    if backend == "mpi":
        from mpi4py import MPI

        def direct(tensor: torch.Tensor) -> Call:
            return partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, [tensor.numpy(), tensor.numel(), MPI.FLOAT])

        return {"MPI.Comm.Allreduce": direct, **ours}
    if backend == STAND_IN:
        return {
            "FakeProcessGroup.allreduce": partial(_queued, _plugin().OneRank(), async_op),
            **ours,
        }
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"{backend} is no layer over a library: ask for gloo, mpi or nccl")
    dist.init_process_group(
        backend, store=dist.FileStore(str(folder / "group"), comm.size), rank=comm.rank, world_size=comm.size
    )
    if backend == "nccl":
        group: Any = dist.distributed_c10d._get_default_group()
        return {"ProcessGroupNCCL.allreduce": partial(_queued, group._get_backend(comm.device), async_op), **ours}
    store = dist.FileStore(str(folder / "direct"), comm.size)
    gloo = dist.ProcessGroupGloo(store, comm.rank, comm.size, timedelta(seconds=TIMEOUT))
    usual = {"torch.distributed.all_reduce": lambda tensor: partial(dist.all_reduce, tensor)}
    return {"ProcessGroupGloo.allreduce": partial(_waited, gloo), **usual, **ours}


def _waited(group: Any, tensor: torch.Tensor) -> Call:
    tensors, options = [tensor], dist.AllreduceOptions()
    return lambda: group.allreduce(tensors, options).wait()


def _awaited(call: Callable[[], Any]) -> Call:
    return lambda: call().wait()


def _queued(group: Any, async_op: bool, tensor: torch.Tensor) -> Call:
    """An all_reduce of torch's own group: synchronous on the caller's stream, as ours."""
    tensors, options = [tensor], dist.AllreduceOptions()
    options.asyncOp = async_op

    def call() -> object:
        work = group.allreduce(tensors, options)
        return None if work is None else work.wait()

    return call


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("gloo", "mpi", "nccl"))
    parser.add_argument("--ranks", type=int, default=2, help="of nccl always one")
    parser.add_argument("--sizes", type=parse_sizes, default="8,1M,16M", help="bytes of float32")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each way to call it")
    parser.add_argument("--stand-in", action="store_true", help="for nccl: a group of torch that does nothing")
    parser.add_argument("--async-op", action="store_true", help="for nccl: asynchronous ops, each with its wait")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.stand_in and asked.backend != "nccl":
        parser.error(f"--stand-in: {asked.backend} needs none")
    if asked.async_op and asked.backend != "nccl":
        parser.error(f"--async-op: not for {asked.backend}, whose asynchronous ops are run by a thread")
    backend = STAND_IN if asked.stand_in else asked.backend
    cost = run(backend, asked.sizes, asked.ranks, asked.rounds, asked.async_op)
    if asked.json:
        print_json(cost)
        return
    table = figures(
        f"all_reduce over {cost.backend}, {counted(cost.ranks, 'rank')}",
        ("size", "way", "median", "least", "more", "speed"),
        names=("way",),
        caption=f"a call, median and least; beside the first; {others(cost.others)}",
    )
    for call in cost.calls:
        times = (f"{call.us:.2f} us", f"{call.least_us:.2f} us", f"{call.extra_us:+.2f} us")
        table.add_row(format_bytes(call.nbytes), call.way, *times, f"x{call.speed:.3f}")
    console().print(table)


if __name__ == "__main__":
    main()
