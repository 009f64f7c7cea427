"""When do hierarchical collectives pay between hosts? `python docs/experiments/hosts.py` (as root).

Hosts are network namespaces. A flat backend and the hierarchical one over it take turns in the same ranks; results are
checked. The bytes that cross the busiest link of a host are counted by its interface, before the turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import torch

from holdfast import comms
from holdfast.comms import Communicator, HoldfastError
from holdfast.comms.system.files import url_of
from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.channel import ChannelClosed, ProcessChannel
from holdfast.ft.processes.zygote_client import zygote, zygote_pid
from holdfast.harness.bench.operations import parse_sizes
from holdfast.harness.measure.results import Noise, figures, others
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns
from holdfast.harness.testbed.netns import EnterNamespace, Network

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
OPS_A_TURN = 3
LIMIT = 600.0
Times = dict[tuple[str, int], tuple[list[float], list[float]]]
"""By op and bytes, for both backends the seconds of each op."""
Counts = dict[tuple[str, int], tuple[int, int]]
"""By op and bytes, for both backends the bytes of one op on the link of a rank's host."""


class HostsCost(msgspec.Struct, frozen=True):
    """One op on `nbytes`, the size of the result or, of a reduce_scatter, of the input.

    Times are medians in ms, of the slowest rank; `speed` is the median over the rounds of flat over layered time.
    The bytes are those that one op sends or receives, whichever is more, over the link of the host where it is most.
    """

    op: str
    nbytes: int
    flat_bytes: int
    layered_bytes: int
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


def run(
    outer: str, sizes: Sequence[int], hosts: int, ranks: int, rounds: int, in_turns: bool, megabits: int = 0
) -> HostsBench:
    """Measure `outer` beside `hier-outer` with `ranks` processes on each host, on links of `megabits` (0: no limit).

    Ranks fill one host after the other, or with `in_turns` go to the hosts in turns, as under `mpirun --map-by node`.
    Raises `Unsupported` if this process may not make namespaces.
    """
    noise, names, count = Noise(zygote_pid), (outer, f"hier-{outer}"), hosts * ranks
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts))
        for host in range(hosts if megabits else 0):
            network.throttle(host, megabits * 1_000_000)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = []
        for rank in range(count):
            host = rank % hosts if in_turns else rank // ranks
            body = _Rank(network.entry(host), names, rank, count, tuple(sizes), rounds, str(folder), megabits)
            environ = {
                "HOLDFAST_CHECK": "0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "UCX_TLS": "tcp,self",
            }
            output = folder / f"rank-{rank}.log"
            process = zygote().spawn(body, name=f"rank {rank}", output=output, threads=1, environ=environ)
            processes.append(process)
            stack.callback(process.close)
        by_rank = [_received(process.channel, folder / f"rank-{rank}.log") for rank, process in enumerate(processes)]
    costs = [
        _cost(op, nbytes, [times[op, nbytes] for times, _ in by_rank], [counts[op, nbytes] for _, counts in by_rank])
        for op, nbytes in by_rank[0][0]
    ]
    return HostsBench(*names, hosts, ranks, tuple(costs), noise.cpus())


def _received(channel: ProcessChannel, output: Path) -> tuple[Times, Counts]:
    """What a rank has measured. Raises `HoldfastError` with its output if it has ended."""
    try:
        return cast(tuple[Times, Counts], channel.recv(LIMIT))
    except ChannelClosed:
        raise HoldfastError(f"a rank has ended: {output.read_text(errors='replace')}") from None


def _cost(
    op: str, nbytes: int, by_rank: Sequence[tuple[list[float], list[float]]], counts: Sequence[tuple[int, int]]
) -> HostsCost:
    flat, layered = ([max(each) for each in zip(*times, strict=True)] for times in zip(*by_rank, strict=True))
    rounds = [
        [statistics.median(times[at : at + OPS_A_TURN]) for at in range(0, len(times), OPS_A_TURN)]
        for times in (flat, layered)
    ]
    speed = statistics.median(a / b for a, b in zip(*rounds, strict=True))
    flat_bytes, layered_bytes = map(max, zip(*counts, strict=True))
    flat_ms, layered_ms = (1e3 * statistics.median(times) for times in (flat, layered))
    return HostsCost(op, nbytes, flat_bytes, layered_bytes, flat_ms, layered_ms, speed)


@dataclass(frozen=True)
class _Rank:
    """The body of a rank: move to the host, connect over both backends, and take turns."""

    entry: EnterNamespace
    names: tuple[str, str]
    rank: int
    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    folder: str
    megabits: int

    def __call__(self, channel: ProcessChannel) -> None:
        self.entry()
        with ExitStack() as stack:
            both = {
                name: stack.enter_context(
                    comms.connect(
                        name,
                        rank=self.rank,
                        size=self.ranks,
                        rendezvous=url_of("file", Path(self.folder) / name),
                        timeout=120.0,
                        hints={"megabits": self.megabits} if self.megabits and name.startswith("hier-") else None,
                    )
                )
                for name in self.names
            }
            found: Times = {}
            counts: Counts = {}
            for op in OPS:
                for nbytes in self.sizes:
                    flat_bytes, layered_bytes = (_Op(op, nbytes, self.ranks).count(both[name]) for name in self.names)
                    counts[op, nbytes] = flat_bytes, layered_bytes
                    turns = take_turns(_Op(op, nbytes, self.ranks), both, range(self.rounds), _raise)
                    flat, layered = (
                        [seconds for turn in turns[name] for seconds in turn.seconds["op"]] for name in self.names
                    )
                    found[op, nbytes] = flat, layered
        channel.send((found, counts))


class _Op(Workload[Communicator]):
    """One op at one size, a few times in a turn; each result is checked."""

    def __init__(self, op: str, nbytes: int, ranks: int) -> None:
        self.name, self._block = op, max(1, nbytes // 4 // ranks)

    def set_up(self, contestant: Communicator) -> None:
        self._run(contestant)

    def count(self, comm: Communicator) -> int:
        """The bytes of one op on the link of this rank's host, in the direction that has more."""
        comm.barrier()
        before = _link_bytes()
        self._run(comm)
        comm.barrier()
        return max(after - earlier for after, earlier in zip(_link_bytes(), before, strict=True))

    def turn(self, contestant: Communicator, number: int) -> TimedTurn:
        return TimedTurn({"op": [self._run(contestant) for _ in range(OPS_A_TURN)]}, wrong=0)

    def _run(self, comm: Communicator) -> float:
        """The seconds of an op. Raises ArithmeticError for a wrong result."""
        block, size, total = self._block, comm.size, comm.size * (comm.size + 1) / 2
        whole, part = torch.full((block * size,), comm.rank + 1.0), torch.full((block,), comm.rank + 1.0)
        calls = {
            "all_reduce": lambda: comm.all_reduce(whole),
            "all_gather": lambda: comm.all_gather_single(whole, part),
            "reduce_scatter": lambda: comm.reduce_scatter_single(part, whole),
            "broadcast": lambda: comm.broadcast(whole, 0),
        }
        comm.barrier()
        began = time.perf_counter()
        calls[self.name]()
        taken = time.perf_counter() - began
        each = torch.arange(1.0, size + 1).repeat_interleave(block)
        right = {"all_reduce": whole == total, "all_gather": whole == each, "reduce_scatter": part == total}
        if not bool(right.get(self.name, whole == 1).all()):
            raise ArithmeticError(f"{self.name} of {comm.backend} came out wrong on rank {comm.rank}")
        return taken


def _link_bytes() -> tuple[int, int]:
    """What this host's interface has received and sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.lstrip().startswith("eth0:")).partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])


def _raise(name: str, error: Exception) -> None:
    raise error


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo", help="the transport between hosts: gloo or ucx")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--sizes", type=parse_sizes, default="1M,4M,16M", help="bytes of float32")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each at each size")
    parser.add_argument("--in-turns", action="store_true", help="give ranks to the hosts in turns")
    parser.add_argument("--megabits", type=int, default=0, help="a second, each way of each link; 0: no limit")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    bench = run(asked.backend, asked.sizes, asked.hosts, asked.ranks, asked.rounds, asked.in_turns, asked.megabits)
    if asked.json:
        print_json(bench)
        return
    columns = ("op", "size", bench.layered, bench.flat, "times as fast", "on a link, of its size", "times as few")
    title = f"{counted(bench.ranks, 'rank')} on each of {counted(bench.hosts, 'host')}"
    table = figures(title, columns, names=("op",), caption=others(bench.others))
    for cost in bench.costs:
        times = (f"{milliseconds:.2f} ms" for milliseconds in (cost.layered_ms, cost.flat_ms))
        link = f"{cost.layered_bytes / cost.nbytes:.2f}, {cost.flat_bytes / cost.nbytes:.2f}"
        fewer = f"{cost.flat_bytes / cost.layered_bytes:.2f}"
        table.add_row(cost.op, format_bytes(cost.nbytes), *times, f"{cost.speed:.2f}", link, fewer)
    console().print(table)


if __name__ == "__main__":
    main()
