"""All_reduce of large tensors in segments that stay in cache.

Each rank receives the others' parts of its part of a segment, adds them to its own while they are in cache, and sends
the result to all: a reduce-scatter and an all-gather by direct exchange. 2 (n - 1) messages a segment; 2 (n - 1) / n of
the tensor travels, which is the minimum. The segmentation is that of Open MPI's segmented ring (J. Pjesivac-Grbovic et
al., "Performance analysis of MPI collective operations", 2007).
"""

from __future__ import annotations

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange, bounds
from holdfast.comms.arithmetic import combine
from holdfast.comms.ops import ReduceOp


def all_reduce(exchange: Exchange, flat: torch.Tensor, op: ReduceOp, part_bytes: int) -> None:
    """Reduce `flat` in place; each rank's part of a segment has `part_bytes`. All ranks get equal bits."""
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
