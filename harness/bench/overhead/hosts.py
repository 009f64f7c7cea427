"""`holdfast bench hosts`: hierarchical collectives beside flat ones, between network namespaces as hosts.

Both communicators are of the same processes, and take turns. Every result is compared with the expected one, and the
bits of all ranks with each other.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.paths import url_of
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.zygote_client import zygote_pid
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.show import figures, others
from holdfast.harness.measure.worker import serve
from holdfast.harness.measure.workers import Fork, Place, Started, WorkerGroup
from holdfast.harness.testbed.netns import EnterNamespace, Network

if TYPE_CHECKING:
    from holdfast.comms import Communicator

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SECONDS = 240.0


class HostsCost(msgspec.Struct, frozen=True):
    """One op on `nbytes`, the size of the result or, of a reduce_scatter, of the input.

    Times are medians in ms, of the slowest rank; `speed` is the median over the rounds of flat over layered time.
    """

    op: str
    nbytes: int
    flat_ms: float
    layered_ms: float
    speed: float


class HostsBench(msgspec.Struct, frozen=True):
    """A whole run. `others`: CPUs that other processes used meanwhile."""

    flat: str
    layered: str
    hosts: int
    ranks: int
    costs: tuple[HostsCost, ...]
    others: float


class _Measured(msgspec.Struct, frozen=True):
    op: str
    nbytes: int
    seconds: list[tuple[float, float]]
    checksums: tuple[int, int]


def run(
    outer: str,
    sizes: Sequence[int],
    hosts: int = 3,
    ranks: int = 2,
    rounds: int = 10,
    in_turns: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> HostsBench:
    """Measure `outer` beside `hier-outer` with `ranks` processes on each host.

    Ranks fill one host after the other, or with `in_turns` go to the hosts in turns, as under `mpirun --map-by node`.
    Raises `Unsupported` if this process may not make namespaces, and `HoldfastError` for a rank that fails.
    """
    noise = Noise(zygote_pid)
    with Network(hosts) as network:
        progress(f"{outer} and hier-{outer}, {counted(hosts * ranks, 'rank')} on {counted(hosts, 'host')}")
        places = [rank % hosts if in_turns else rank // ranks for rank in range(hosts * ranks)]

        def start(place: Place) -> Sequence[Started]:
            return [
                Fork(
                    place,
                    f"rank {rank}",
                    partial(_be_rank, place, outer, rank, hosts * ranks, network.entry(host)),
                    environ={
                        "HOLDFAST_HOST": network.addresses[host],
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "UCX_TLS": "tcp,self",
                    },
                )
                for rank, host in enumerate(places)
            ]

        with WorkerGroup(outer, hosts * ranks, start) as group:
            by_rank = group.call("measure", tuple(sizes), rounds, into=list[_Measured], timeout=SECONDS)
    costs = tuple(_cost(measured) for measured in zip(*by_rank, strict=True))
    return HostsBench(outer, f"hier-{outer}", hosts, ranks, costs, noise.cpus())


def _cost(by_rank: Sequence[_Measured]) -> HostsCost:
    op, nbytes = by_rank[0].op, by_rank[0].nbytes
    if op != "reduce_scatter" and len({measured.checksums for measured in by_rank}) > 1:
        raise HoldfastError(f"{op} of {nbytes} bytes has given other bits on some ranks")
    flat, layered = (
        [max(turn[way] for turn in turns) for turns in zip(*(m.seconds for m in by_rank), strict=True)]
        for way in range(2)
    )
    speed = statistics.median(one / other for one, other in zip(flat, layered, strict=True))
    return HostsCost(op, nbytes, statistics.median(flat) * 1e3, statistics.median(layered) * 1e3, speed)


class HostsRank:
    """One rank, on its host."""

    def __init__(self, outer: str, meeting: str, rank: int, size: int) -> None:
        self._outer, self._meeting, self._rank, self._size = outer, meeting, rank, size

    def measure(self, sizes: tuple[int, ...], rounds: int) -> list[_Measured]:
        """Take turns between both communicators."""
        measured = []
        with self._connect(self._outer, "flat") as flat, self._connect(f"hier-{self._outer}", "layered") as layered:
            for op in OPS:
                for nbytes in sizes:
                    turns = [(_timed(flat, op, nbytes), _timed(layered, op, nbytes)) for _ in range(rounds + 2)][2:]
                    seconds = [(one[0], other[0]) for one, other in turns]
                    measured.append(_Measured(op, nbytes, seconds, (turns[-1][0][1], turns[-1][1][1])))
        return measured

    def _connect(self, backend: str, name: str) -> Communicator:
        from holdfast import comms

        return comms.connect(
            backend, rank=self._rank, size=self._size, rendezvous=self._meeting, name=name, timeout=120.0
        )


def _be_rank(place: Place, outer: str, rank: int, size: int, entry: EnterNamespace) -> None:
    entry()
    meeting = url_of("file", place.folder / "meeting")
    serve(place.address, HostsRank(outer, meeting, rank, size), "rank", rank, outer)


def _timed(comm: Communicator, op: str, nbytes: int) -> tuple[float, int]:
    """The seconds of one op from a barrier on, and the checksum of its result."""
    import torch

    size, rank = comm.size, comm.rank
    part = max(1, nbytes // 4 // size)
    total = size * (size + 1) / 2
    call: Callable[[], object]
    if op == "all_reduce":
        result = torch.full((part * size,), rank + 1.0)
        expected = torch.full_like(result, total)
        call = partial(comm.all_reduce, result)
    elif op == "broadcast":
        result = torch.full((part * size,), rank + 1.0)
        expected = torch.full_like(result, 2.0)
        call = partial(comm.broadcast, result, 1)
    elif op == "all_gather":
        result, given = torch.empty(part * size), torch.full((part,), rank + 1.0)
        expected = torch.arange(1.0, size + 1).repeat_interleave(part)
        call = partial(comm.all_gather_single, result, given)
    else:
        result, given = torch.empty(part), torch.full((part * size,), rank + 1.0)
        expected = torch.full_like(result, total)
        call = partial(comm.reduce_scatter_single, result, given)
    comm.barrier()
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    if not torch.equal(result, expected):
        raise HoldfastError(f"{op} of {nbytes} bytes over {comm.backend!r} gave a wrong result on rank {rank}")
    return seconds, zlib.crc32(result.numpy().tobytes())


def show(bench: HostsBench, out: Console) -> None:
    """Print the costs."""
    columns = ("op", "size", bench.layered, bench.flat, "times as fast")
    title = f"{counted(bench.ranks, 'rank')} on each of {counted(bench.hosts, 'host')}"
    table = figures(title, columns, names=("op",), caption=others(bench.others))
    for cost in bench.costs:
        times = (f"{milliseconds:.2f} ms" for milliseconds in (cost.layered_ms, cost.flat_ms))
        table.add_row(cost.op, format_bytes(cost.nbytes), *times, f"{cost.speed:.2f}")
    out.print(table)
