"""Recursive doubling and halving: partners at distance 1, 2, 4 ...; log2 n rounds.

R. Rabenseifner, "Optimization of Collective Reduction Operations" (2004). If n is not a power of two, the ranks above
the largest one send their input to a partner first, and receive the result from it at the end.
"""

from __future__ import annotations

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange
from holdfast.comms.arithmetic import combine
from holdfast.comms.ops import ReduceOp


def all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> None:
    """Recursive doubling, in place. log2 n messages of b bytes: for small tensors.

    Both partners compute the same sum of the same two values in the same order, so all ranks get equal bits.
    """
    rank, ranks = exchange.rank, _fold(exchange, flat, op)
    if rank >= ranks:
        return
    arriving = torch.empty_like(flat)
    distance = 1
    while distance < ranks:
        partner = rank ^ distance
        exchange.swap(flat, partner, arriving, partner)
        combine(flat, arriving, op, other_first=partner < rank)
        distance *= 2
    _unfold(exchange, flat, ranks)


def halving_all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> None:
    """Rabenseifner's: recursive halving to reduce, doubling to gather, in place. 2 log2 n messages, 2 b bytes."""
    rank, ranks = exchange.rank, _fold(exchange, flat, op)
    if rank >= ranks:
        return
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
    _unfold(exchange, flat, ranks)


def _fold(exchange: Exchange, flat: torch.Tensor, op: ReduceOp) -> int:
    """Fold in the inputs of the ranks above a power of two, which is returned; those ranks have the result then."""
    rank, size = exchange.rank, exchange.size
    ranks = 1 << (size.bit_length() - 1)
    if rank >= ranks:
        exchange.send(flat, rank - ranks)
        exchange.recv(flat, rank - ranks)
    elif rank + ranks < size:
        arriving = torch.empty_like(flat)
        exchange.recv(arriving, rank + ranks)
        combine(flat, arriving, op)
    return ranks


def _unfold(exchange: Exchange, flat: torch.Tensor, ranks: int) -> None:
    """Send the result to the rank whose input was folded in."""
    if exchange.rank + ranks < exchange.size:
        exchange.send(flat, exchange.rank + ranks)
