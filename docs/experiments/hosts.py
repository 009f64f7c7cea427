"""When do hierarchical collectives pay between hosts? `python docs/experiments/hosts.py` (as root).

Hosts are network namespaces. A flat backend and the hierarchical one over it take turns in the same ranks; results are
checked.
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

import msgspec
import torch

from holdfast import comms
from holdfast.comms import Communicator
from holdfast.comms.system.paths import url_of
from holdfast.ft.console.console import console, print_json
from holdfast.ft.console.units import counted, format_bytes
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import zygote, zygote_pid
from holdfast.harness.bench.collectives.definitions import parse_sizes
from holdfast.harness.measure.noise import Noise
from holdfast.harness.measure.rounds import TimedTurn, Workload, take_turns
from holdfast.harness.measure.show import figures, others
from holdfast.harness.testbed.netns import EnterNamespace, Network

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
OPS_A_TURN = 3
LIMIT = 600.0
Times = dict[tuple[str, int], tuple[list[float], list[float]]]
"""By op and bytes, for both backends the seconds of each op."""


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


def run(outer: str, sizes: Sequence[int], hosts: int, ranks: int, rounds: int, in_turns: bool) -> HostsBench:
    """Measure `outer` beside `hier-outer` with `ranks` processes on each host.

    Ranks fill one host after the other, or with `in_turns` go to the hosts in turns, as under `mpirun --map-by node`.
    Raises `Unsupported` if this process may not make namespaces.
    """
    noise, names, count = Noise(zygote_pid), (outer, f"hier-{outer}"), hosts * ranks
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = []
        for rank in range(count):
            host = rank % hosts if in_turns else rank // ranks
            body = _Rank(network.entry(host), names, rank, count, tuple(sizes), rounds, str(folder))
            environ = {
                "HOLDFAST_CHECK": "0",
                "GLOO_SOCKET_IFNAME": "eth0",
                "UCX_TLS": "tcp,self",
            }
            output = folder / f"rank-{rank}.log"
            process = zygote().spawn(body, name=f"rank {rank}", output=output, threads=1, environ=environ)
            processes.append(process)
            stack.callback(process.close)
        by_rank: list[Times] = [process.channel.recv(LIMIT) for process in processes]
    costs = [_cost(op, nbytes, [rank[op, nbytes] for rank in by_rank]) for op, nbytes in by_rank[0]]
    return HostsBench(*names, hosts, ranks, tuple(costs), noise.cpus())


def _cost(op: str, nbytes: int, by_rank: Sequence[tuple[list[float], list[float]]]) -> HostsCost:
    flat, layered = ([max(each) for each in zip(*times, strict=True)] for times in zip(*by_rank, strict=True))
    rounds = [
        [statistics.median(times[at : at + OPS_A_TURN]) for at in range(0, len(times), OPS_A_TURN)]
        for times in (flat, layered)
    ]
    speed = statistics.median(a / b for a, b in zip(*rounds, strict=True))
    return HostsCost(op, nbytes, 1e3 * statistics.median(flat), 1e3 * statistics.median(layered), speed)


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
                    )
                )
                for name in self.names
            }
            found: Times = {}
            for op in OPS:
                for nbytes in self.sizes:
                    turns = take_turns(_Op(op, nbytes, self.ranks), both, range(self.rounds), _raise)
                    flat, layered = (
                        [seconds for turn in turns[name] for seconds in turn.seconds["op"]] for name in self.names
                    )
                    found[op, nbytes] = flat, layered
        channel.send(found)


class _Op(Workload[Communicator]):
    """One op at one size, a few times in a turn; each result is checked."""

    def __init__(self, op: str, nbytes: int, ranks: int) -> None:
        self.name, self._block = op, max(1, nbytes // 4 // ranks)

    def set_up(self, contestant: Communicator) -> None:
        self._run(contestant)

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
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    bench = run(asked.backend, asked.sizes, asked.hosts, asked.ranks, asked.rounds, asked.in_turns)
    if asked.json:
        print_json(bench)
        return
    columns = ("op", "size", bench.layered, bench.flat, "times as fast")
    title = f"{counted(bench.ranks, 'rank')} on each of {counted(bench.hosts, 'host')}"
    table = figures(title, columns, names=("op",), caption=others(bench.others))
    for cost in bench.costs:
        times = (f"{milliseconds:.2f} ms" for milliseconds in (cost.layered_ms, cost.flat_ms))
        table.add_row(cost.op, format_bytes(cost.nbytes), *times, f"{cost.speed:.2f}")
    console().print(table)


if __name__ == "__main__":
    main()
