"""Direct exchange between every pair of ranks, in n - 1 rounds.

R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms.algorithms.message_passing.exchange import Exchange
from holdfast.comms.arithmetic import combine
from holdfast.comms.errors import Mismatch
from holdfast.comms.ops import ReduceOp

Tensor = torch.Tensor


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
