"""What reductions there are on CPU memory, for every dtype that torch can reduce; how they run is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.comms import _native
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp

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
"""Reduced as float32 where a backend does not say that it reduces them itself."""

_WIDE_INTEGERS = (torch.int64, torch.uint64)
_NUMPY_DIVIDES = (torch.uint16, torch.uint32, torch.uint64)
"""torch moves these, but does not divide them."""

_BASE = {"avg": "sum", "premul_sum": "sum"}
_KINDS: dict[tuple[torch.dtype, str], int] = {}


def kind(dtype: torch.dtype, op: ReduceOp) -> int:
    """The number under which the compiled code knows this reduction (the sum, for avg and premul_sum)."""
    known = _KINDS.get((dtype, op.name))
    if known is None:
        name = str(dtype).removeprefix("torch.")
        known = _KINDS[dtype, op.name] = _native.kind(name, _BASE.get(op.name, op.name))
    return known


def combine(target: torch.Tensor, other: torch.Tensor, op: ReduceOp, other_first: bool = False) -> None:
    """target = target op other, of two contiguous tensors alike (the sum, for avg and premul_sum).

    With `other_first` it is other op target: the same number, but of equal zeros or several NaNs another may stay.
    """
    at, there = target.data_ptr(), other.data_ptr()
    first, second = (there, at) if other_first else (at, there)
    _native.combine(kind(target.dtype, op), at, first, second, target.numel())


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise `Unsupported` if numbers of `dtype` cannot be reduced by `op`."""
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


def silent() -> Any:
    """Overflow gives infinity, as in torch, and numpy does not warn of it: wrap what adds numpy arrays."""
    return np.errstate(over="ignore", invalid="ignore", under="ignore")


SCALED = frozenset({"avg", "premul_sum"})
"""The reductions before or after which something is to be done; elsewhere `before` and `after` may be left out."""


def wider(dtype: torch.dtype, op: ReduceOp) -> torch.dtype | None:
    """In which dtype averages and scaled sums of narrow numbers are made, and rounded once at the end; None: their own.

    The average of numbers fits their dtype, where their sum need not: 60000 and 60000 in float16. float32 and wider
    ones are summed as they are.
    """
    if op.name not in SCALED:
        return None
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else None
    return None if dtype.is_complex or dtype in _WIDE_INTEGERS else torch.int64


def before(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """What a rank contributes: `tensor`, or a scaled copy of it for premul_sum."""
    return tensor * op.factor if op.name == "premul_sum" else tensor


def after(tensor: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Turn the sum over `size` ranks into the result, in place (avg divides; integers towards zero)."""
    if op.name == "avg" and tensor.dtype in _NUMPY_DIVIDES:
        numbers = tensor.numpy()
        np.floor_divide(numbers, size, out=numbers)
    elif op.name == "avg":
        exact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        tensor.div_(size, rounding_mode=None if exact else "trunc")
