"""What an op is: `OpDescription` for the executor and those that watch it, `OpPlan` for the code that runs it."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import torch

from holdfast.comms import arithmetic
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES

OpTensors = torch.Tensor | tuple[torch.Tensor, ...] | None
"""The tensors that must agree on all ranks, in dtype and shape."""


class OpDescription(msgspec.Struct, frozen=True):
    """One op of one rank, described once. `nbytes` is the size of this rank's input.

    All ranks issue a `collective` alike. What must agree between ranks are `tensors`, in dtype and shape, and `detail`
    (a reduction, a root, a tag; several are a tuple). `peer` is the root or the other side, -1 if there is none.
    `inputs` and `outputs` are for hooks: the tensors that this rank reads and writes.
    """

    name: str
    nbytes: int
    collective: bool = True
    tensors: OpTensors = None
    detail: Hashable = None
    peer: int = -1
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    reduction: ReduceOp | None = None

    def agreed(self) -> str:
        """The text of what must be equal on all ranks. The shape, which may be long, is last."""
        words = [*self.detail] if isinstance(self.detail, tuple) else [self.detail or ""]
        if isinstance(self.tensors, torch.Tensor):
            words += [self.tensors.dtype, tuple(self.tensors.shape)]
        elif self.tensors:
            words += [self.tensors[0].dtype, f"{[tensor.numel() for tensor in self.tensors]} elements"]
        return ", ".join(filter(None, map(str, words)))


OPS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
_COUNTED = ("all_reduce", "reduce", "broadcast")
"""The ops whose tensors have the same number of elements on all ranks."""

_REDUCTIONS = ("", "sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")


class OpPlan(msgspec.Struct, frozen=True):
    """A collective without its tensors: made once for each op, dtype, size, root and reduction, and cached.

    `op` is a name of `OPS`; `nbytes` is the size of the input. `count` is the number of elements where it must be the
    same on all ranks, else 0. `timeout` is in seconds. `signature` packs what ranks must agree on into one word, for a
    fast comparison before they access each other's memory; `kind` is the number of the reduction for compiled code, -1
    for a move.
    """

    op: str
    dtype: torch.dtype | None
    nbytes: int
    count: int
    root: int
    reduction: ReduceOp | None
    timeout: float
    signature: int
    kind: int

    @staticmethod
    def make(
        op: str,
        dtype: torch.dtype | None = None,
        nbytes: int = 0,
        root: int = 0,
        reduction: ReduceOp | None = None,
        timeout: float = 0.0,
    ) -> OpPlan:
        """The plan of an op."""
        count = nbytes // dtype.itemsize if op in _COUNTED and dtype is not None else 0
        name = "" if reduction is None else reduction.name
        kind = -1 if reduction is None or dtype is None else arithmetic.kind(dtype, reduction)
        return OpPlan(op, dtype, nbytes, count, root, reduction, timeout, signature(op, dtype, root, name, count), kind)


def signature(op: str, dtype: torch.dtype | None, root: int, reduction: str, count: int) -> int:
    """Pack an op: op in 4 bits, reduction 4, dtype 7, root 12, number of elements 36."""
    return (
        1 + OPS.index(op)
        | _REDUCTIONS.index(reduction) << 4
        | (DTYPE_CODE[dtype] if dtype is not None else 0) << 8
        | (root & 0xFFF) << 15
        | (count & 0xFFFFFFFFF) << 27
    )


def describe(packed: int, roots_before: int) -> str:
    """Describe a published signature for an error message.

    In place of the root it holds a digest of the roots of all ops; `roots_before` is that of the ops before this one.
    """
    op = OPS[(packed & 15) - 1] if 0 < packed & 15 <= len(OPS) else "nothing"
    details = [str(DTYPES[packed >> 8 & 127]), f"{packed >> 27} elements"]
    if op in ("reduce", "broadcast", "gather", "scatter"):
        details.append(f"root {(packed >> 15) - 5 * roots_before - 1 & 0xFFF}")
    if reduction := _REDUCTIONS[packed >> 4 & 15]:
        details.append(reduction)
    return f"{op}({', '.join(details)})"
