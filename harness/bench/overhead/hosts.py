"""`holdfast bench hosts`: hierarchical collectives beside flat ones, between network namespaces as hosts.

They are two contestants of the bench of ops, whose ranks are placed on the hosts; results are checked as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console

from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.contestants import HOLDFAST, ContestantGroup, RankPlace
from holdfast.harness.bench.collectives.run import BenchPlan, complete
from holdfast.harness.bench.collectives.run import run as run_bench
from holdfast.harness.measure.show import figures, others
from holdfast.harness.testbed.netns import Network

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
OPS_A_TURN = 3


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
    flat, layered = f"{HOLDFAST}{outer}", f"{HOLDFAST}hier-{outer}"
    with Network(hosts) as network:

        def placed(rank: int) -> RankPlace:
            host = rank % hosts if in_turns else rank // ranks
            environ = {"HOLDFAST_HOST": network.addresses[host], "GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "tcp,self"}
            return RankPlace(network.entry(host), environ)

        plan = BenchPlan(
            operations=OPS,
            contestants=(flat, layered),
            ours=(layered,),
            ranks=(hosts * ranks,),
            sizes=tuple(sizes),
            rounds=rounds,
            iterations=OPS_A_TURN,
        )
        found = run_bench(plan, progress, lambda contestant, number: ContestantGroup(contestant, number, placed))
    bench = complete(found)
    times = {(row.contestant, row.op, row.nbytes): row.timing.p50 / 1e3 for row in bench.rows}
    costs = tuple(
        HostsCost(
            each.op, each.nbytes, times[flat, each.op, each.nbytes], times[layered, each.op, each.nbytes], each.median
        )
        for each in bench.ratios
    )
    return HostsBench(outer, f"hier-{outer}", hosts, ranks, costs, bench.machine.others)


def show(bench: HostsBench, out: Console) -> None:
    """Print the costs."""
    columns = ("op", "size", bench.layered, bench.flat, "times as fast")
    title = f"{counted(bench.ranks, 'rank')} on each of {counted(bench.hosts, 'host')}"
    table = figures(title, columns, names=("op",), caption=others(bench.others))
    for cost in bench.costs:
        times = (f"{milliseconds:.2f} ms" for milliseconds in (cost.layered_ms, cost.flat_ms))
        table.add_row(cost.op, format_bytes(cost.nbytes), *times, f"{cost.speed:.2f}")
    out.print(table)
