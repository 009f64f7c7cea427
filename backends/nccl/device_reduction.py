"""Expresses the reductions that NCCL and RCCL lack by those that they have, on the device.

These reduce bytes, 32- and 64-bit integers and floats, by sum, product, minimum and maximum, and drop NaNs when they
compare. All else is converted: narrow integers are widened, unsigned ones get the top bit flipped, booleans become
bytes, complex numbers pairs, 8-bit floats float32, and compared floats become integers of the same order, in which NaNs
survive. Bitwise reductions and complex products cannot be converted; they are gathered and combined where the result is
needed. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.comms import arithmetic
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp

Tensor = torch.Tensor

PLAIN = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""The dtypes that NCCL has."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BOOLS = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min", "bxor": "sum"}
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
    "product": torch.mul,
}


@dataclass(frozen=True, slots=True)
class DeviceReduction:
    """The conversion of one reduction.

    `given` is what this rank passes to the library, which reduces it by `native` (a name of `ReduceOp`, with `factor`);
    `finish(reduced, target)` converts the result. `given` may share its memory with the tensor it was made of.
    """

    given: Callable[[Tensor], Tensor]
    native: ReduceOp
    finish: Callable[[Tensor, Tensor, int], None]

    @property
    def straight(self) -> bool:
        """Whether the library reduces the tensor itself, if its dtype is one of `PLAIN`."""
        return self.given in (_itself, _wide)


def device_reduction_of(dtype: torch.dtype, op: ReduceOp) -> DeviceReduction | None:
    """The conversion for `dtype` and `op`; None if they are gathered and combined. `Unsupported` if neither works."""
    arithmetic.check_reducible(dtype, op)
    if dtype == torch.bool:
        return DeviceReduction(_as_bytes, ReduceOp(_BOOLS[op.name]), _from_bytes)  # type: ignore[arg-type]
    if op.name in ("band", "bor", "bxor") or (dtype.is_complex and op.name == "product"):
        return None
    if dtype.is_complex:
        return DeviceReduction(torch.view_as_real, op, _from_pairs)
    if op.name in ("min", "max"):
        if dtype.is_floating_point:
            return DeviceReduction(lambda tensor: _ordered(tensor, op), op, _from_ordered)
        if dtype in (torch.uint16, torch.uint32, torch.uint64):
            return DeviceReduction(_flip_top_bit, op, _from_flipped)
    if dtype in EIGHT_BIT_FLOATS:
        return DeviceReduction(lambda tensor: tensor.float(), op, _narrow)
    if dtype in PLAIN and dtype.is_floating_point:
        scaled = op.name == "premul_sum" and dtype == torch.bfloat16
        return DeviceReduction(
            (lambda tensor: tensor * op.factor) if scaled else _itself, ReduceOp.SUM if scaled else op, _copy
        )
    if op.name == "avg":
        if dtype == torch.uint64:
            raise Unsupported("avg of uint64 on this device", "sum, and divide on the host")
        return DeviceReduction(lambda tensor: tensor.to(torch.int64), ReduceOp.SUM, _divide)
    return DeviceReduction(_wide, op, _narrow)


def combine(parts: Sequence[Tensor], op: ReduceOp, output: Tensor) -> None:
    """Reduce `parts` in order into `output`, for reductions that cannot be converted."""
    function = _COMBINE[op.name]
    signed = output.dtype if output.dtype.is_complex else _SIGNED[output.dtype.itemsize]
    total = output.view(signed).view(-1)
    total.copy_(parts[0].view(signed).view(-1))
    for part in parts[1:]:
        function(total, part.view(signed).view(-1), out=total)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _copy(reduced: Tensor, target: Tensor, size: int) -> None:
    if reduced.data_ptr() != target.data_ptr():
        target.copy_(reduced.view(target.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _from_bytes(reduced: Tensor, target: Tensor, size: int) -> None:
    target.copy_((reduced & 1).view(target.shape))


def _from_pairs(reduced: Tensor, target: Tensor, size: int) -> None:
    _copy(reduced, torch.view_as_real(target), size)


def _wide(tensor: Tensor) -> Tensor:
    """Widen 16-bit integers to 32 bits, unsigned as signed: sums and products agree modulo 2^n."""
    if tensor.dtype in (torch.int16, torch.uint16):
        return tensor.to(torch.int32)
    return tensor.view(_SIGNED[tensor.dtype.itemsize]) if tensor.dtype != torch.uint8 else tensor


def _narrow(reduced: Tensor, target: Tensor, size: int) -> None:
    if reduced.dtype.itemsize == target.dtype.itemsize:
        _copy(reduced.view(target.dtype), target, size)
    elif target.dtype == torch.uint16:
        target.view(torch.int16).copy_(reduced.view(target.shape))
    else:
        target.copy_(reduced.view(target.shape))


def _divide(reduced: Tensor, target: Tensor, size: int) -> None:
    """Divide the 64-bit sum by `size`, rounding towards zero."""
    quotient = torch.div(reduced.view(target.shape), size, rounding_mode="trunc")
    if target.dtype in (torch.uint16, torch.uint32):
        signed = _SIGNED[target.dtype.itemsize]
        target.view(signed).copy_(quotient)
    else:
        target.copy_(quotient)


def _top_bit(dtype: torch.dtype) -> int:
    return int(torch.iinfo(dtype).min)


def _flip_top_bit(tensor: Tensor) -> Tensor:
    """Convert unsigned integers to signed ones of the same order."""
    if tensor.dtype == torch.uint16:
        return tensor.to(torch.int32)
    signed = _SIGNED[tensor.dtype.itemsize]
    return tensor.view(signed) ^ _top_bit(signed)


def _from_flipped(reduced: Tensor, target: Tensor, size: int) -> None:
    if target.dtype == torch.uint16:
        _narrow(reduced, target, size)
    else:
        _copy((reduced ^ _top_bit(reduced.dtype)).view(target.dtype), target, size)


def _ordered(tensor: Tensor, op: ReduceOp) -> Tensor:
    """Convert floats to integers of the same order; NaNs lie beyond the infinity on the winning side."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    bits = wide.view(_SIGNED[wide.dtype.itemsize])
    limits = torch.iinfo(bits.dtype)
    keys = torch.where(bits < 0, bits ^ limits.max, bits)
    return keys.masked_fill_(torch.isnan(wide), limits.min if op.name == "min" else limits.max)


def _from_ordered(reduced: Tensor, target: Tensor, size: int) -> None:
    limits = torch.iinfo(reduced.dtype)
    bits = torch.where(reduced < 0, reduced ^ limits.max, reduced)
    target.copy_(bits.view(torch.float32 if bits.dtype == torch.int32 else torch.float64).view(target.shape))
