"""all_reduce of sparse tensors: an all-gather of every rank's entries, which each rank then adds."""

from __future__ import annotations

import torch

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.quantities import time_left

Tensor = torch.Tensor


def all_reduce_sparse(communicator: Communicator, tensor: Tensor, op: ReduceOp, timeout: float | None) -> None:
    """Sum or average a sparse COO tensor over all ranks, in place. Raises `Unsupported` for others."""
    if tensor.layout != torch.sparse_coo or op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise Unsupported(f"all_reduce ({op.name}) of {tensor.layout} tensors", "sum sparse COO tensors")
    coalesced = tensor.detach().coalesce()
    indices, values = coalesced.indices(), coalesced.values()
    size, left = communicator.size, time_left(timeout)
    counts = torch.empty(size, dtype=torch.int64, device=values.device)
    count = torch.tensor([indices.shape[1]], dtype=torch.int64, device=values.device)
    communicator.all_gather_single(counts, count, timeout=left())
    lengths = [int(n) for n in counts]
    all_indices = [indices.new_empty((indices.shape[0], n)) for n in lengths]
    all_values = [values.new_empty((n, *values.shape[1:])) for n in lengths]
    communicator.all_gather(all_indices, indices.contiguous(), timeout=left())
    communicator.all_gather(all_values, values, timeout=left())
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape, device=tensor.device
    ).coalesce()
    if op == ReduceOp.AVG:
        total = total / size
    with torch.no_grad():
        tensor.copy_(total)
