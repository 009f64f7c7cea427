"""`holdfast bench hosts`: hierarchical collectives beside flat ones, between network namespaces as hosts.

Both communicators are of the same processes, and take turns. Every result is compared with the expected one, and the
bits of all ranks with each other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.comms.system.paths import url_of
from holdfast.ft.console.units import counted
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import zygote, zygote_pid
from holdfast.harness.measure.noise import Noise
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
    with Network(hosts) as network, tempfile.TemporaryDirectory(prefix="holdfast-hosts-") as folder:
        progress(f"{outer} and hier-{outer}, {counted(hosts * ranks, 'rank')} on {counted(hosts, 'host')}")
        processes = []
        try:
            for rank in range(hosts * ranks):
                host = rank % hosts if in_turns else rank // ranks
                job = _Job(outer, url_of("file", Path(folder) / "meeting"), rank, hosts * ranks, tuple(sizes), rounds)
                processes.append(
                    zygote().spawn(
                        _rank(job, network.entry(host)),
                        name=f"rank {rank}",
                        output=Path(folder) / f"{rank}.log",
                        environ={
                            "HOLDFAST_CHECK": "0",
                            "HOLDFAST_HOST": network.addresses[host],
                            "GLOO_SOCKET_IFNAME": "eth0",
                            "UCX_TLS": "tcp,self",
                        },
                    )
                )
            by_rank = []
            for process in processes:
                try:
                    outcome = process.channel.recv(SECONDS)
                except EOFError:
                    raise HoldfastError(f"{process.name} ended: {process.epitaph()}") from None
                if isinstance(outcome, str):
                    raise HoldfastError(f"{process.name} failed: {outcome}")
                by_rank.append(msgspec.msgpack.decode(outcome, type=list[_Measured]))
        finally:
            for process in processes:
                process.close()
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


class _Job(msgspec.Struct, frozen=True):
    outer: str
    meeting: str
    rank: int
    size: int
    sizes: tuple[int, ...]
    rounds: int


def _rank(job: _Job, entry: EnterNamespace) -> Callable[[ProcessChannel], None]:
    """The body of one process: takes turns between both communicators, and sends what it measured."""

    def target(channel: ProcessChannel) -> None:
        entry()
        try:
            measured = _measure(job)
        except Exception as error:
            channel.send(f"{type(error).__name__}: {error}")
            return
        channel.send(msgspec.msgpack.encode(measured))

    return target


def _measure(job: _Job) -> list[_Measured]:
    from holdfast import comms

    def connect(backend: str, name: str) -> Communicator:
        return comms.connect(backend, rank=job.rank, size=job.size, rendezvous=job.meeting, name=name, timeout=120.0)

    measured = []
    with connect(job.outer, "flat") as flat, connect(f"hier-{job.outer}", "layered") as layered:
        for op in OPS:
            for nbytes in job.sizes:
                turns = [(_timed(flat, op, nbytes), _timed(layered, op, nbytes)) for _ in range(job.rounds + 2)][2:]
                seconds = [(one[0], other[0]) for one, other in turns]
                measured.append(_Measured(op, nbytes, seconds, (turns[-1][0][1], turns[-1][1][1])))
    return measured


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
