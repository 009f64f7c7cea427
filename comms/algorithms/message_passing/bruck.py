"""Dissemination: in round k, every rank exchanges with those 2^k away; log2 n rounds for any n.

J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems" (1997); the
barrier is D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization" (1988).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange


def all_gather(exchange: Exchange, flats: Sequence[torch.Tensor]) -> None:
    """Fill the other entries of `flats`; this rank's own is there already. log2 n messages; for small entries."""
    rank, size = exchange.rank, exchange.size
    have = 1
    while have < size:
        count = min(have, size - have)
        dst, src = (rank - have) % size, (rank + have) % size
        given = torch.cat([flats[(rank + i) % size] for i in range(count)])
        wanted = [flats[(src + i) % size] for i in range(count)]
        taken = torch.empty(sum(flat.numel() for flat in wanted), dtype=given.dtype, device="cpu")
        exchange.swap(given, dst, taken, src)
        start = 0
        for flat in wanted:
            flat.copy_(taken[start : start + flat.numel()])
            start += flat.numel()
        have += count


def barrier(exchange: Exchange) -> None:
    """Return once all ranks have entered."""
    token, other = torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
    distance = 1
    while distance < exchange.size:
        exchange.swap(
            token, (exchange.rank + distance) % exchange.size, other, (exchange.rank - distance) % exchange.size
        )
        distance *= 2
