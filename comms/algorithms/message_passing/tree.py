"""Trees from one root: binomial for latency, a pipelined chain for bandwidth.

Binomial trees are in R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005); pipelined chains in J. Worringen, "Pipelining and Overlapping for MPI Collective Operations" (2003).
"""

from __future__ import annotations

import torch

from holdfast.comms.algorithms.message_passing.cost import PIPELINE_BYTES
from holdfast.comms.algorithms.message_passing.exchange import Exchange
from holdfast.comms.arithmetic import combine
from holdfast.comms.ops import ReduceOp


def broadcast(exchange: Exchange, flat: torch.Tensor, src: int) -> None:
    """Binomial: log2 n rounds, in each of which every rank that has the tensor sends it on."""
    size = exchange.size
    place = (exchange.rank - src) % size
    distance = 1
    while distance < size:
        if place < distance:
            if place + distance < size:
                exchange.send(flat, (exchange.rank + distance) % size)
        elif place < 2 * distance:
            exchange.recv(flat, (exchange.rank - distance) % size)
        distance *= 2


def pipelined_broadcast(exchange: Exchange, flat: torch.Tensor, src: int) -> None:
    """A chain from the source: each rank forwards a segment while it receives the next. Each link carries b bytes."""
    size = exchange.size
    place = (exchange.rank - src) % size
    before, behind = (exchange.rank - 1) % size, (exchange.rank + 1) % size
    step = max(1, PIPELINE_BYTES // flat.element_size())
    under_way: list[object] = []
    for start in range(0, flat.numel(), step):
        segment = flat[start : start + step]
        if place > 0:
            exchange.recv(segment, before)
        if place < size - 1:
            under_way.append(exchange.begin_send(segment, behind))
    exchange.finish(*under_way)


def reduce(exchange: Exchange, flat: torch.Tensor, dst: int, op: ReduceOp) -> None:
    """Binomial, towards `dst`; overwrites `flat` on the other ranks. log2 n messages of b bytes."""
    size = exchange.size
    place = (exchange.rank - dst) % size
    arriving = torch.empty_like(flat)
    distance = 1
    while distance < size:
        if place & distance:
            exchange.send(flat, (exchange.rank - distance) % size)
            return
        if place + distance < size:
            exchange.recv(arriving, (exchange.rank + distance) % size)
            combine(flat, arriving, op)
        distance *= 2
