"""Collectives over messages: the algorithms, with the papers that they are from. `cost` says which is the fastest.

The direct exchanges and binomial trees are in R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.algorithms.message_passing.cost import PIPELINE_BYTES
from holdfast.comms.algorithms.message_passing.exchange import Begin, Exchange, bounds
from holdfast.comms.arithmetic import combine
from holdfast.comms.errors import Mismatch
from holdfast.comms.ops import ReduceOp

Tensor = torch.Tensor


# -- recursive doubling and halving: partners at distance 1, 2, 4 ...
#
# R. Rabenseifner, "Optimization of Collective Reduction Operations" (2004). If n is not a power of two, the ranks above
# the largest one send their input to a partner first, and receive the result from it at the end.


def doubling_all_reduce(begin: Begin, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
    """Recursive doubling, in place. log2 n messages of b bytes: for small tensors.

    Both partners compute the same sum of the same two values in the same order, so all ranks get equal bits.
    """
    exchange, flat = begin(deadline), tensor.view(-1)
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


def halving_all_reduce(begin: Begin, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
    """Rabenseifner's: recursive halving to reduce, doubling to gather, in place. 2 log2 n messages, 2 b bytes."""
    exchange, flat = begin(deadline), tensor.view(-1)
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


def _fold(exchange: Exchange, flat: Tensor, op: ReduceOp) -> int:
    """Fold in the inputs of the ranks above a power of two; return that. Those ranks have the result then."""
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


def _unfold(exchange: Exchange, flat: Tensor, ranks: int) -> None:
    """Send the result to the rank that gave its input."""
    if exchange.rank + ranks < exchange.size:
        exchange.send(flat, exchange.rank + ranks)


# -- rings: each rank exchanges with its two neighbours only, and all links carry the same load
#
# P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).


def ring_all_reduce(begin: Begin, op: ReduceOp, tensor: Tensor, deadline: float) -> None:
    """Reduce a tensor in place. n ranks, b bytes: 2 (n-1) messages of b/n.

    Each part is reduced along the ring, so its bits are one rank's, and the same everywhere.
    """
    exchange, flat = begin(deadline), tensor.view(-1)
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
    ring_all_gather(exchange, [*parts[1:], parts[0]])


def ring_all_gather(exchange: Exchange, flats: Sequence[Tensor]) -> None:
    """Fill the other entries of `flats`; this rank's own is there already. n - 1 messages of one entry."""
    rank, size = exchange.rank, exchange.size
    for step in range(size - 1):
        given, taken = flats[(rank - step) % size], flats[(rank - step - 1) % size]
        exchange.swap(given, (rank + 1) % size, taken, (rank - 1) % size)


# -- dissemination


def bruck_all_gather(exchange: Exchange, flats: Sequence[Tensor]) -> None:
    """Fill the other entries of `flats`; this rank's own is there already. log2 n messages; for small entries.

    In round k, every rank exchanges with those 2^k away. J. Bruck et al., "Efficient algorithms for all-to-all
    communications in multiport message-passing systems" (1997).
    """
    rank, size = exchange.rank, exchange.size
    flats = [flat.view(torch.uint8) for flat in flats]  # torch cannot copy every dtype
    have = 1
    while have < size:
        count = min(have, size - have)
        dst, src = (rank - have) % size, (rank + have) % size
        given = torch.cat([flats[(rank + i) % size] for i in range(count)])
        wanted = [flats[(src + i) % size] for i in range(count)]
        taken = torch.empty(sum(flat.numel() for flat in wanted), dtype=torch.uint8, device="cpu")
        exchange.swap(given, dst, taken, src)
        start = 0
        for flat in wanted:
            flat.copy_(taken[start : start + flat.numel()])
            start += flat.numel()
        have += count


def barrier(exchange: Exchange) -> None:
    """Return once all ranks have entered. Rounds as in `bruck_all_gather`.

    D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization" (1988).
    """
    token, other = torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
    distance = 1
    while distance < exchange.size:
        exchange.swap(
            token, (exchange.rank + distance) % exchange.size, other, (exchange.rank - distance) % exchange.size
        )
        distance *= 2


# -- trees from one root; the pipelined chain is in J. Worringen, "Pipelining and Overlapping for MPI Collective
# Operations" (2003)


def binomial_broadcast(exchange: Exchange, flat: Tensor, src: int) -> None:
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


def pipelined_broadcast(exchange: Exchange, flat: Tensor, src: int) -> None:
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


def binomial_reduce(exchange: Exchange, flat: Tensor, dst: int, op: ReduceOp) -> None:
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


# -- direct exchange between every pair of ranks


def copy_own(target: Tensor, source: Tensor) -> None:
    """Copy a rank's own share, which is not sent. Raises `Mismatch` if the sizes differ."""
    if target.nbytes != source.nbytes:
        raise Mismatch(f"a rank gives itself {source.nbytes} bytes and expects {target.nbytes}; both must agree")
    if target.data_ptr() != source.data_ptr():
        target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))


def all_to_all(exchange: Exchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Send `inputs[j]` to rank j, receive `outputs[i]` from rank i. n - 1 rounds; sizes may differ; each byte moves
    once.
    """
    rank, size = exchange.rank, exchange.size
    copy_own(outputs[rank], inputs[rank])
    for step in range(1, size):
        dst, src = (rank + step) % size, (rank - step) % size
        exchange.swap(inputs[dst], dst, outputs[src], src)


def reduce_scatter(exchange: Exchange, inputs: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction of every rank's `inputs[rank]`. n - 1 messages of one part; sizes may differ."""
    rank, size = exchange.rank, exchange.size
    result = inputs[rank].clone()
    arriving = torch.empty_like(result)
    for step in range(1, size):
        dst, src = (rank + step) % size, (rank - step) % size
        exchange.swap(inputs[dst], dst, arriving, src)
        combine(result, arriving, op)
    return result


def gather(exchange: Exchange, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int) -> None:
    """Gather `tensor` of rank i into `outputs[i]` on rank `dst`, all at once."""
    if outputs is None:
        exchange.send(tensor, dst)
        return
    copy_own(outputs[dst], tensor)
    exchange.finish(*[exchange.begin_recv(output, r) for r, output in enumerate(outputs) if r != dst])


def scatter(exchange: Exchange, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int) -> None:
    """Scatter `inputs[i]` of rank `src` into `tensor` of rank i, all at once."""
    if inputs is None:
        exchange.recv(tensor, src)
        return
    copy_own(tensor, inputs[src])
    exchange.finish(*[exchange.begin_send(part, r) for r, part in enumerate(inputs) if r != src])


def segmented_all_reduce(exchange: Exchange, flat: Tensor, op: ReduceOp, part_bytes: int) -> None:
    """Reduce a large tensor in place, in segments that stay in cache; each rank's part of one has `part_bytes`.

    Each rank receives the others' parts of its part of a segment, adds them to its own, and sends the result to all: 2
    (n - 1) messages a segment; 2 (n - 1) / n of the tensor travels, which is the minimum. All ranks get equal bits. The
    segmentation is that of Open MPI's segmented ring (J. Pjesivac-Grbovic et al., "Performance analysis of MPI
    collective operations", 2007).
    """
    rank, size = exchange.rank, exchange.size
    part = max(1, part_bytes // flat.element_size())
    after = [(rank + step) % size for step in range(1, size)]
    before = [(rank - step) % size for step in range(1, size)]
    scratch = flat.new_empty((size - 1, part))
    for start in range(0, flat.numel(), part * size):
        segment = flat[start : start + part * size]
        edges = bounds(segment.numel(), size)
        parts = [segment[edges[r] : edges[r + 1]] for r in range(size)]
        mine = parts[rank]
        arriving = [scratch[i, : mine.numel()] for i in range(size - 1)]
        receives = [exchange.begin_recv(arriving[i], src) for i, src in enumerate(after)]
        sends = [exchange.begin_send(parts[dst], dst) for dst in before]
        for receive, block in zip(receives, arriving, strict=True):
            exchange.finish(receive)
            combine(mine, block, op)
        exchange.finish(*sends)
        results = [exchange.begin_recv(parts[src], src) for src in after]
        results += [exchange.begin_send(mine, dst) for dst in before]
        exchange.finish(*results)
