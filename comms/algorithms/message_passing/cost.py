"""Choose the fastest algorithm by Hockney's model, in which b bytes take `latency` + b / `bandwidth`.

R. Hockney, "The communication challenge for MPP" (1994); the costs of the algorithms are those of R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), without reductions,
which add the same to each. The two constants are those that `holdfast tune` measured on this machine, else those that
the backend announces (`BackendInfo.links`). All ranks use those of rank 0: with different constants they would run
different algorithms.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.comms.algorithms.message_passing import tuning
from holdfast.comms.errors import CorruptData
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.rendezvous import fetch
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.base import Link as Link  # plugins of API 1.0 import it from here
from holdfast.comms.transport.liveness import Liveness

log = logging.getLogger("holdfast.comms")

PIPELINE_BYTES = 256 * 1024
"""The segment of a pipelined broadcast."""

_BROKEN = "error: "


def agree(context: Context, link: Link) -> Link:
    """Return rank 0's constants on every rank: measured ones, else those of `link`; collective.

    Raises `CorruptData`, on every rank, if the measurements of rank 0 cannot be used; `PeerFailed` if a rank is gone.
    """
    if context.rank == 0:
        try:
            link = here(link)
        except CorruptData as error:
            context.store.set("link", f"{_BROKEN}{error}")
            raise
        context.store.set("link", f"{link.latency!r} {link.bandwidth!r}")
        return link
    with contextlib.closing(Liveness(context.peers, context.rank, context.over)) as liveness:
        told = fetch(context.store, "link", context.deadline, liveness).decode(errors="replace")
    if told.startswith(_BROKEN):
        raise CorruptData(f"on rank 0 {told.removeprefix(_BROKEN)}")
    try:
        latency, bandwidth = map(float, told.split())
    except ValueError as error:
        raise CorruptData(f"the link constants that rank 0 published cannot be read: {told[:100]!r}") from error
    return replace(link, latency=latency, bandwidth=bandwidth)


def here(link: Link) -> Link:
    """Return `link` with the constants measured on this machine, if there are any; the log says which it is."""
    found = tuning.load().links.get(link.name) if link.name else None
    if found is None:
        log.info("link %s: %s; defaults, since `holdfast tune` has not measured it here", link.name or "unnamed", link)
        return link
    log.info("link %s: measured here on %s", link.name, found.measured)
    return replace(link, latency=found.latency, bandwidth=found.bandwidth)


def choose(costs: Mapping[str, float]) -> str:
    """The name of the lowest cost; the first of equals."""
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


ALGORITHM = Hint(
    "algorithm",
    str,
    "the algorithm of ops that have it, instead of the one that the cost model chooses",
    choices=("doubling", "halving", "ring", "binomial", "pipeline", "bruck"),
    per_op=True,
)

OPS = {"all_reduce": all_reduce, "broadcast": broadcast, "all_gather": all_gather}
"""The ops with several algorithms, and the cost of each."""
