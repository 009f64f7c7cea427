"""Reductions of CPU tensors: which dtypes and ops exist, scaling before and after, and calls of the compiled code."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.comms import _native
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp, reduction_kind

REDUCIBLE = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float16,
    torch.bfloat16,
)
EIGHT_BIT_FLOATS = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
"""Reduced as float32, unless a backend declares that it reduces them itself."""

_WIDE_INTEGERS = (torch.int64, torch.uint64)
_NUMPY_DIVIDES = (torch.uint16, torch.uint32, torch.uint64)
"""Integer dtypes that torch cannot divide."""


def combine(target: torch.Tensor, other: torch.Tensor, op: ReduceOp, other_first: bool = False) -> None:
    """target = target op other, for contiguous tensors of equal shape and dtype (the sum, for avg and premul_sum).

    With `other_first`, target = other op target: the result may then be another one of several NaNs or signed zeros.
    """
    at, there = target.data_ptr(), other.data_ptr()
    first, second = (there, at) if other_first else (at, there)
    _native.combine(reduction_kind(target.dtype, op), at, first, second, target.numel())


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise `Unsupported` if `op` cannot reduce numbers of `dtype`."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in REDUCIBLE and dtype not in EIGHT_BIT_FLOATS:
        raise Unsupported(f"reducing {name}", "convert the tensor to a wider dtype first")
    if op.name in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise Unsupported(f"bitwise reduction of {name}", "bitwise reductions need bool or an integer dtype")
    if op.name in ("min", "max") and dtype.is_complex:
        raise Unsupported(f"{op.name} of {name}", "complex numbers have no order")
    if op.name in ("avg", "premul_sum") and dtype == torch.bool:
        raise Unsupported(f"{op.name} of bool", "reduce with bor or band")
    if op.name == "premul_sum" and not (dtype.is_floating_point or dtype.is_complex):
        raise Unsupported(f"premul_sum of {name}", "premul_sum needs a floating-point dtype")


SCALED = frozenset({"avg", "premul_sum"})
"""The reductions that need `prescale` or `postscale`; for others both do nothing."""


def accumulation_dtype(dtype: torch.dtype, op: ReduceOp) -> torch.dtype | None:
    """The wider dtype in which to compute an average or scaled sum, rounded once at the end; None: `dtype` itself.

    An average of numbers fits their dtype, but their sum may not: 60000 + 60000 in float16. float32 and wider dtypes
    are summed as they are.
    """
    if op.name not in SCALED:
        return None
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else None
    return None if dtype.is_complex or dtype in _WIDE_INTEGERS else torch.int64


def prescale(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """A rank's contribution to the sum: `tensor` itself, or for premul_sum a scaled copy."""
    return tensor * op.factor if op.name == "premul_sum" else tensor


def postscale(tensor: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Turn the sum over `size` ranks into the result, in place: avg divides, integers towards zero."""
    if op.name == "avg" and tensor.dtype in _NUMPY_DIVIDES:
        numbers = tensor.numpy()
        np.floor_divide(numbers, size, out=numbers)
    elif op.name == "avg":
        exact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        tensor.div_(size, rounding_mode=None if exact else "trunc")
