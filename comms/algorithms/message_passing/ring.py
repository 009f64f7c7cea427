"""Ring algorithms: each rank exchanges with its two neighbours only, and all links carry the same load.

P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange, bounds
from holdfast.comms.arithmetic import combine
from holdfast.comms.ops import ReduceOp


def all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> None:
    """Reduce a flat tensor in place. n ranks, b bytes: 2 (n-1) messages of b/n.

    Each part is reduced along the ring, so its bits are one rank's, and the same everywhere.
    """
    rank, size = exchange.rank, exchange.size
    edges = bounds(flat.numel(), size)
    parts = [flat[edges[i] : edges[i + 1]] for i in range(size)]
    arriving = torch.empty(max(part.numel() for part in parts), dtype=flat.dtype, device="cpu")
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        given, taken = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        incoming = arriving[: taken.numel()]
        exchange.swap(given, right, incoming, left)
        combine(taken, incoming, op)
    for step in range(size - 1):
        given, taken = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        exchange.swap(given, right, taken, left)


def all_gather(exchange: Exchange, flats: Sequence[torch.Tensor]) -> None:
    """Fill the other entries of `flats`; this rank's own is there already. n - 1 messages of one entry."""
    rank, size = exchange.rank, exchange.size
    for step in range(size - 1):
        given, taken = flats[(rank - step) % size], flats[(rank - step - 1) % size]
        exchange.swap(given, (rank + 1) % size, taken, (rank - 1) % size)
