"""How two blocks of numbers become one: the reductions on CPU memory, for every dtype that torch can reduce.

Blocks are numpy arrays where numpy has the dtype (a fifth of torch's cost a call, and no thread pool), and torch
tensors for the 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp

Block = Any  # np.ndarray or torch.Tensor

NUMPY: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
TORCH_BLOCK_ELEMENTS = 32768
"""Up to here torch computes in the calling thread."""
_HALF = (torch.float16, torch.bfloat16)
REDUCIBLE = (*NUMPY, *_HALF)

Combine = Callable[[Block, Block, Block], object]
"""combine(a, b, out): out = a op b; out may be a or b."""


def _with_out(function: Callable[..., object]) -> Combine:
    return lambda a, b, out: function(a, b, out=out)


_WITH_NUMPY: dict[str, Combine] = {
    "sum": np.add,
    "product": np.multiply,
    "min": _with_out(np.minimum),
    "max": _with_out(np.maximum),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_WITH_TORCH: dict[str, Combine] = {
    "sum": _with_out(torch.add),
    "product": _with_out(torch.mul),
    "min": _with_out(torch.minimum),
    "max": _with_out(torch.maximum),
}
_BASE = {"avg": "sum", "premul_sum": "sum"}


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Raise `Unsupported` if numbers of `dtype` cannot be reduced by `op`."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in REDUCIBLE:
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
    """Overflow gives infinity, as in torch, and no warning: wrap what calls a `Combine`."""
    return np.errstate(over="ignore", invalid="ignore", under="ignore")


def combiner(dtype: torch.dtype, op: ReduceOp) -> Combine:
    """The function that combines two blocks of `dtype` under `op` (the sum, for avg and premul_sum)."""
    return (_WITH_NUMPY if dtype in NUMPY else _WITH_TORCH)[_BASE.get(op.name, op.name)]


def block_of(tensor: torch.Tensor) -> Block:
    """The flat block over the memory of a contiguous tensor."""
    flat = tensor.view(-1)
    return flat.numpy() if tensor.dtype in NUMPY else flat


def block_at(buffer: Any, offset: int, dtype: torch.dtype, count: int) -> Block:
    """The block of `count` numbers at byte `offset` of a writable buffer. `count` must not be 0."""
    if dtype in NUMPY:
        return np.frombuffer(buffer, NUMPY[dtype], count, offset)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)


def block_elements(dtype: torch.dtype, nbytes: int) -> int:
    """How many numbers a working block of at most `nbytes` holds; torch's thread pool stays out of it."""
    count = nbytes // dtype.itemsize
    return count if dtype in NUMPY else min(count, TORCH_BLOCK_ELEMENTS)


def before(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """What a rank contributes: `tensor`, or a scaled copy of it for premul_sum."""
    return tensor * op.factor if op.name == "premul_sum" else tensor


def after(tensor: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Turn the sum over `size` ranks into the result, in place (avg divides; integers towards zero)."""
    if op.name == "avg":
        exact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        tensor.div_(size, rounding_mode=None if exact else "trunc")
