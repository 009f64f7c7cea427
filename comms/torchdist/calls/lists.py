"""Lists of tensors in one call: in torch, the tensors of several devices of one rank.

They are checked as torch's gloo group does, which raises ValueError, and reduced to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from holdfast.comms import arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.overlap import span

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def some(op: str, tensors: Tensors) -> None:
    """Require at least one tensor."""
    if not tensors:
        raise ValueError(f"{op}: the list of tensors is empty; pass at least one")


def of_one_type(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, and one dtype."""
    some(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{op}: tensor {index} is {tensor.dtype}, tensor 0 {tensors[0].dtype}; pass one dtype")


def of_one_size(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, one dtype, and one number of elements."""
    of_one_type(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.numel() != tensors[0].numel():
            sizes = f"{tuple(tensor.shape)}, another {tuple(tensors[0].shape)}"
            raise ValueError(f"{op}: tensor {index} has the shape {sizes}; pass one shape")


def alike(op: str, tensors: Tensors) -> None:
    """Require at least one tensor, one dtype and one shape. A tensor may be repeated, but not overlap another."""
    of_one_type(op, tensors)
    for index, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            sizes = f"{tuple(tensor.shape)}, tensor 0 {tuple(tensors[0].shape)}"
            raise ValueError(f"{op}: tensor {index} has the shape {sizes}; pass one shape")
    if overlap(list({tensor.data_ptr(): tensor for tensor in tensors if tensor.layout == torch.strided}.values())):
        raise ValueError(f"{op}: two of the tensors overlap; pass tensors with memory of their own")


def root_tensor(op: str, tensors: Tensors, index: int) -> None:
    """Require that `opts.rootTensor` is the index of one of the tensors."""
    if not 0 <= index < len(tensors):
        raise ValueError(f"{op}: rootTensor={index} is out of range: {len(tensors)} tensors were given")


def one(op: str, items: Sequence[object], what: str) -> None:
    """Require a list of length one: of one tensor, or of one list of tensors."""
    if len(items) != 1:
        raise ValueError(f"{op}: {what} must be a list of one, not of {len(items)}: a rank has one device here")


def of_root(op: str, items: Sequence[object], what: str, rank: int, root: int) -> None:
    """Require a list of length one on the root, and an empty list on other ranks."""
    if rank == root:
        one(op, items, what)
    elif items:
        raise ValueError(f"{op}: {what} must be empty on rank {rank}: it belongs to the root, rank {root}")


def pairs(op: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
    """Require as many outputs as inputs, and at least one."""
    if not inputs or len(outputs) != len(inputs):
        raise ValueError(
            f"{op}: {len(outputs)} outputs for {len(inputs)} inputs; pass one output for each, and at least one"
        )


def overlap(tensors: Tensors) -> bool:
    """Whether any two of the tensors may share memory."""
    extents = sorted(span(tensor) for tensor in tensors if tensor.numel())
    return any(end > start for (_, end), (start, _) in pairwise(extents))


# -- reductions


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
