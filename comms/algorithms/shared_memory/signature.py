"""Pack what ranks must agree on, before they access each other's memory, into one word for a fast comparison."""

from __future__ import annotations

import torch

from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES

_OPS = (
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
_REDUCTIONS = ("", "sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")


def signature(op: str, dtype: torch.dtype | None, root: int, reduction: str, count: int) -> int:
    """Pack an op: op in 4 bits, reduction 4, dtype 7, root 12, number of elements 36."""
    return (
        1 + _OPS.index(op)
        | _REDUCTIONS.index(reduction) << 4
        | (DTYPE_CODE[dtype] if dtype is not None else 0) << 8
        | (root & 0xFFF) << 15
        | (count & 0xFFFFFFFFF) << 27
    )


def describe(packed: int, roots_before: int) -> str:
    """Describe a published signature for an error message.

    In place of the root it holds a digest of the roots of all ops; `roots_before` is that of the ops before this one.
    """
    op = _OPS[(packed & 15) - 1] if 0 < packed & 15 <= len(_OPS) else "nothing"
    details = [str(DTYPES[packed >> 8 & 127]), f"{packed >> 27} elements"]
    if op in ("reduce", "broadcast", "gather", "scatter"):
        details.append(f"root {(packed >> 15) - 5 * roots_before - 1 & 0xFFF}")
    if reduction := _REDUCTIONS[packed >> 4 & 15]:
        details.append(reduction)
    return f"{op}({', '.join(details)})"
