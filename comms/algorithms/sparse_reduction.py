"""all_reduce of sparse tensors: an all-gather of every rank's entries, which each rank then adds."""

from __future__ import annotations

import torch

from holdfast.comms.arithmetic import postscale, prescale
from holdfast.comms.ops import ReduceOp
from holdfast.comms.transport.base import Transport

Tensor = torch.Tensor

SPARSE_REDUCTIONS = frozenset(["sum", "avg", "premul_sum"])
"""The others would have to know the zeros that are not stored."""


def all_reduce_sparse(transport: Transport, entries: Tensor, op: ReduceOp, deadline: float) -> Tensor:
    """The sum, average or scaled sum of every rank's `entries`, a coalesced COO tensor; equal bits on every rank."""
    indices, values = entries.indices().contiguous(), prescale(entries.values(), op).contiguous()
    counts = torch.empty(transport.size, dtype=torch.int64, device=values.device)
    transport.all_gather_single(counts, torch.full_like(counts[:1], indices.shape[1]), deadline)
    lengths = counts.tolist()
    all_indices = [indices.new_empty((indices.shape[0], length)) for length in lengths]
    all_values = [values.new_empty((length, *values.shape[1:])) for length in lengths]
    transport.all_gather(all_indices, indices, deadline)
    transport.all_gather(all_values, values, deadline)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), entries.shape, device=entries.device, check_invariants=False
    ).coalesce()
    postscale(total.values(), op, transport.size)
    return total
