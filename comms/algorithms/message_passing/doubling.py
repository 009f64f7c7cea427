"""Recursive doubling and halving: partners at distance 1, 2, 4 ...; log2 n rounds.

R. Rabenseifner, "Optimization of Collective Reduction Operations" (2004). If n is not a power of two, the ranks above
the largest one send their input to a partner first, and receive the result from it at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange
from holdfast.comms.arithmetic import combine
from holdfast.comms.ops import ReduceOp


def all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> None:
    """Recursive doubling, in place. log2 n messages of b bytes: for small tensors.

    Both partners compute the same sum of the same two values in the same order, so all ranks get equal bits.
    """

    def body(rank: int, ranks: int) -> None:
        arriving = torch.empty_like(flat)
        distance = 1
        while distance < ranks:
            partner = rank ^ distance
            exchange.swap(flat, partner, arriving, partner)
            combine(flat, arriving, op, other_first=partner < rank)
            distance *= 2

    _on_power_of_two(exchange, flat, op, body)


def halving_all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> None:
    """Rabenseifner's: recursive halving to reduce, doubling to gather, in place. 2 log2 n messages, 2 b bytes."""

    def body(rank: int, ranks: int) -> None:
        start, stop = 0, flat.numel()
        arriving = torch.empty((stop + 1) // 2, dtype=flat.dtype, device="cpu")
        spans: list[tuple[int, int, int, int, int]] = []
        distance = ranks // 2
        while distance:
            partner = rank ^ distance
            middle = (start + stop) // 2
            keep, give = ((start, middle), (middle, stop)) if rank < partner else ((middle, stop), (start, middle))
            incoming = arriving[: keep[1] - keep[0]]
            exchange.swap(flat[give[0] : give[1]], partner, incoming, partner)
            combine(flat[keep[0] : keep[1]], incoming, op)
            spans.append((partner, *keep, *give))
            start, stop = keep
            distance //= 2
        for partner, keep_start, keep_stop, give_start, give_stop in reversed(spans):
            exchange.swap(flat[keep_start:keep_stop], partner, flat[give_start:give_stop], partner)

    _on_power_of_two(exchange, flat, op, body)


def _on_power_of_two(exchange: Exchange, flat: torch.Tensor, op: ReduceOp, body: Callable[[int, int], None]) -> None:
    """Run `body(rank, ranks)` on a power of two of ranks, after folding in the inputs of the others."""
    rank, size = exchange.rank, exchange.size
    ranks = 1 << (size.bit_length() - 1)
    if rank >= ranks:
        exchange.send(flat, rank - ranks)
        exchange.recv(flat, rank - ranks)
        return
    above = rank + ranks
    if above < size:
        arriving = torch.empty_like(flat)
        exchange.recv(arriving, above)
        combine(flat, arriving, op)
    body(rank, ranks)
    if above < size:
        exchange.send(flat, above)
