"""`holdfast bench layer`: what holdfast adds to a call of another library's transport.

For nccl that is one rank, and the time of the host: a call returns once the op is queued. Where there is no GPU, a
group of torch that does nothing stands in for NCCL, and the rest of the path is the same.

The same all_reduce of the same ranks, called in two or three ways that are contestants of the bench of ops and take
turns in the same processes: on the library's own object, with everything prepared beforehand; as the library's users
call it, which for gloo is `torch.distributed.all_reduce`; and through holdfast.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console

from holdfast.comms.errors import BackendUnavailable, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.contestants import shared
from holdfast.harness.bench.collectives.ranks import LAYERED
from holdfast.harness.bench.collectives.run import BenchPlan, complete
from holdfast.harness.bench.collectives.run import run as run_bench
from holdfast.harness.bench.drivers.layered import STAND_IN, WAYS
from holdfast.harness.bench.output.results import Bench
from holdfast.harness.measure.show import figures, others

TURN_SECONDS = 0.01


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
    """Measure, about a second for each size and ten rounds.

    Raises `Unsupported` for a backend that is no layer, `BackendUnavailable`, `HoldfastError` if a rank fails.
    """
    if backend not in WAYS:
        known = ", ".join(repr(name) for name in WAYS if name != STAND_IN)
        raise Unsupported(f"what holdfast adds over {backend!r}", f"ask for one of {known}")
    if backend != STAND_IN and (missing := registry().backend(backend).missing) is not None:
        raise BackendUnavailable(backend, missing.reason, missing.install_hint)
    ranks = 1 if backend in ("nccl", STAND_IN) else ranks
    plan = BenchPlan(
        operations=("all_reduce",),
        contestants=WAYS[backend],
        ours=(),
        ranks=(ranks,),
        sizes=tuple(sizes),
        rounds=rounds,
        seconds=rounds * TURN_SECONDS,
    )
    bench = complete(run_bench(plan, progress, shared(f"{LAYERED}{backend}")))
    return LayerCost(backend, ranks, tuple(_costs(bench)), bench.machine.others)


def _costs(bench: Bench) -> Iterator[CallCost]:
    """The cost of each way at each size, beside that of the first."""
    first = {row.nbytes: row.turns for row in reversed(bench.rows)}
    for row in bench.rows:
        pairs = list(zip(row.turns, first[row.nbytes], strict=True))
        yield CallCost(
            row.nbytes,
            row.contestant,
            row.timing.p50,
            row.timing.min,
            statistics.median(ours - direct for ours, direct in pairs),
            statistics.median(direct / ours for ours, direct in pairs),
        )


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
