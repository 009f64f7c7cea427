"""Reduces several tensors of one rank to one: in torch, they are those of its devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.comms import arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp

Tensor = torch.Tensor


def total(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The reduction of the tensors, in memory of its own.

    Raises `Unsupported` for several tensors if their reduction depends on the number of ranks, and for several sparse
    ones unless they are summed.
    """
    result = tensors[0].detach().clone()
    if len(tensors) == 1:
        return result
    if result.layout != torch.strided:
        if op is not ReduceOp.SUM:
            raise Unsupported(f"allreduce of several sparse tensors by {op.name}", "pass one tensor, or sum them")
        return sum(tensors[1:], result).detach()
    if op.name in arithmetic.SCALED:
        raise Unsupported(f"allreduce ({op.name}) of several tensors of one rank", "pass one tensor")
    for tensor in tensors[1:]:
        arithmetic.combine(result, tensor.detach(), op)
    return result


def copy_to_all(result: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set each of the tensors to the result."""
    with torch.no_grad():  # `detach` would give a sparse tensor other values
        for tensor in tensors:
            tensor.copy_(result)
