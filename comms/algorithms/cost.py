"""Which algorithm is quickest: Hockney's model, in which b bytes take `latency` + b / `bandwidth`.

R. Hockney, "The communication challenge for MPP" (1994); the costs of the algorithms are those of R. Thakur,
R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), reductions left
out: they add alike to each. The two constants must be alike on all ranks, or they would run different algorithms:
rank 0's are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport import Context

PIPELINE_BYTES = 256 * 1024
"""The segment of a pipelined broadcast."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one message costs between two ranks: `latency` in seconds, `bandwidth` in bytes a second."""

    latency: float
    bandwidth: float

    def seconds(self, messages: float, nbytes: float) -> float:
        return messages * self.latency + nbytes / self.bandwidth


def agree(context: Context, link: Link) -> Link:
    """Rank 0's constants, on every rank; collective."""
    if context.rank == 0:
        context.store.set("link", f"{link.latency!r} {link.bandwidth!r}")
        return link
    latency, bandwidth = fetch(context.store, "link", context.deadline).decode().split()
    return Link(float(latency), float(bandwidth))


def choose(costs: Mapping[str, float]) -> str:
    """The cheapest; the first of equals."""
    return min(costs, key=lambda name: costs[name])


def all_reduce(link: Link, ranks: int, nbytes: int) -> dict[str, float]:
    """Seconds that each algorithm takes for a tensor of `nbytes`."""
    rounds = ranks.bit_length() - 1
    folded = 0 if ranks & (ranks - 1) == 0 else 2
    share = (ranks - 1) / ranks * nbytes
    return {
        "doubling": link.seconds(rounds + folded, (rounds + folded) * nbytes),
        "halving": link.seconds(2 * rounds + folded, 2 * share + folded * nbytes),
        "ring": link.seconds(2 * (ranks - 1), 2 * share),
    }


def broadcast(link: Link, ranks: int, nbytes: int) -> dict[str, float]:
    """Seconds that each algorithm takes for a tensor of `nbytes`."""
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    stages = ranks - 2 + math.ceil(nbytes / PIPELINE_BYTES)
    return {
        "binomial": link.seconds(rounds, rounds * nbytes),
        "pipeline": link.seconds(stages, stages * min(nbytes, PIPELINE_BYTES)),
    }


def all_gather(link: Link, ranks: int, nbytes: int) -> dict[str, float]:
    """Seconds that each algorithm takes when a rank gives `nbytes`."""
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    copies = 2 * ranks * nbytes
    return {
        "bruck": link.seconds(rounds, (ranks - 1) * nbytes + copies),
        "ring": link.seconds(ranks - 1, (ranks - 1) * nbytes),
    }
