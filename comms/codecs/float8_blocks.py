"""fp8 (e4m3) with a power of two as the scale of each block of a row.

If m is the largest finite magnitude of a block, an element x arrives as y with |y - x| <= max(|x| / 16, m / 2**17).
Zeros keep their sign; a block of denormals has a scale of its own, so the bound holds there too. A NaN arrives as NaN,
with other bits; an infinity arrives as NaN, because e4m3 has none. y never exceeds the largest finite number of its
dtype.
"""

from __future__ import annotations

import torch

from holdfast.comms import _native

BLOCK = 128
"""The most elements that share a scale. Blocks begin at the first element of each row."""
_LARGEST = 448.0
_AT_ONCE = 1 << 18
"""About so many elements are converted at a time: so temporary memory is small."""


def blocks_of(row: int) -> int:
    """The number of blocks of a row of so many elements."""
    return -(-row // BLOCK)


def encode(source: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Write rows of floating-point numbers as `codes` (float8_e4m3fn) and the `exponents` of their blocks (int16)."""
    row = source.shape[1]
    block = min(BLOCK, row)
    step = max(1, _AT_ONCE // max(row, 1))
    for start in range(0, len(source), step):
        part, into, scales = (each[start : start + step] for each in (source, codes, exponents))
        if source.dtype == torch.float64:
            _encode_double(part, into, scales, block)
        else:
            part = part.float()
            _native.float8_encode(part.data_ptr(), len(part), row, block, into.data_ptr(), scales.data_ptr())


def decode(codes: torch.Tensor, exponents: torch.Tensor, into: torch.Tensor, first: int, block: int) -> None:
    """Fill rows of a floating-point tensor from what `encode` wrote of them, or of a range of their elements.

    The range begins at element `first` of its first block; all blocks of the rows but the last have `block` elements.
    """
    row = into.shape[1]
    step = max(1, _AT_ONCE // max(row, 1))
    for start in range(0, len(into), step):
        part, found, scales = (each[start : start + step] for each in (into, codes, exponents))
        if into.dtype == torch.float64:
            blocks = _in_blocks(found.to(torch.float64), block, first)
            part.copy_(_times_power_of_two(blocks, scales).flatten(1)[:, first : first + row])
            continue
        direct = into.dtype == torch.float32 and into.stride(1) == 1
        rows = part if direct else torch.empty(part.shape, dtype=torch.float32, device="cpu")
        _native.float8_decode(
            found.data_ptr(), scales.data_ptr(), len(rows), row, first, block, rows.data_ptr(), rows.stride(0)
        )
        if not direct:
            limit = torch.finfo(into.dtype).max
            part.copy_(rows.clamp_(-limit, limit))


def _encode_double(source: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, block: int) -> None:
    """As the compiled code does it: float64 has numbers for which that has no power of two."""
    blocks = _in_blocks(source, block, 0)
    finite = blocks.isfinite()
    most = torch.where(finite, blocks.abs(), 0.0).amax(2)
    fraction, exponent = torch.frexp(most / _LARGEST)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # 2**exponent >= most / 448
    exponent = torch.where(most == 0, 0, exponent)
    scaled = torch.where(finite, _times_power_of_two(blocks, -exponent).clamp(-_LARGEST, _LARGEST), float("nan"))
    exponents.copy_(exponent)
    codes.copy_(scaled.flatten(1)[:, : source.shape[1]].float())


def _in_blocks(rows: torch.Tensor, block: int, first: int) -> torch.Tensor:
    """Rows in blocks, with zeros before the first element and after the last one."""
    missing = -(first + rows.shape[1]) % block
    return torch.nn.functional.pad(rows, (first, missing)).view(len(rows), -1, block)


def _times_power_of_two(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Finite numbers stay finite. In two steps: the power itself may be too large or too small."""
    exponent = exponents.to(torch.int32)[..., None]
    half = exponent // 2
    one, limit = torch.ones_like(exponent, dtype=blocks.dtype), torch.finfo(blocks.dtype).max
    return (blocks * torch.ldexp(one, half) * torch.ldexp(one, exponent - half)).clamp(-limit, limit)
