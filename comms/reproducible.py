"""Sums whose bits depend on the values alone: not on how many ranks hold them, their order, nor the backend.

Each rank owns a part of the result. All contributions to it come to the owner (an all-to-all), who adds them exactly
and rounds once; the parts then go to all (an all-gather): the volume of an ordinary all_reduce.

The exact addition is pre-rounding, after Demmel and Nguyen, "Fast Reproducible Floating-Point Summation" (2013):
every contribution to an element is split on grids that only the largest of them fixes, coarse enough that sums of
grid points round nowhere in float64. Half and single precision need one grid, 2^-36 of the largest value; float64 two,
down to 2^-72. That is finer than the rounding error of a plain sum in the tensor's own dtype. A sum with NaN, or with
infinities of both signs, is NaN; one with an infinity is that infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.comms.algorithms import arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors import packed, unpack
from holdfast.comms.transport import Transport

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Tensor = torch.Tensor

_CARRY_BITS = 16
MOST_CONTRIBUTIONS = 1 << _CARRY_BITS
_GRID_BITS = 52 - _CARRY_BITS
_ORDER_FREE = ("min", "max", "band", "bor", "bxor")


def sum_contributions(
    comm: Communicator, contributions: Sequence[Tensor], output: Tensor, timeout: float | None = None
) -> None:
    """Fill `output`, on every rank, with the sum of all contributions of all ranks; collective.

    Each rank gives as many contributions as it likes, none included, each of `output`'s shape and a floating dtype:
    the result does not depend on who holds which. At most 65,536 in all. Raises ValueError and `Unsupported` before
    any byte moves.
    """
    if not output.dtype.is_floating_point or output.dtype not in arithmetic.REDUCIBLE:
        raise Unsupported(f"a reproducible sum of {output.dtype}", "use float16, bfloat16, float32 or float64")
    for tensor in contributions:
        if tensor.shape != output.shape or tensor.dtype != output.dtype or tensor.device != output.device:
            raise ValueError(
                f"a contribution is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, output {output.dtype} "
                f"{tuple(output.shape)} on {output.device}; they must be alike"
            )

    def body(deadline: float) -> None:
        transport = comm._transport
        counts = [torch.zeros(1, dtype=torch.int64, device=output.device) for _ in range(comm.size)]
        transport.all_gather(counts, torch.full_like(counts[0], len(contributions)), deadline)
        flat = packed(output)
        _sum(transport, [packed(t) for t in contributions], [int(c.item()) for c in counts], flat, deadline)
        unpack(flat, output)

    comm.issue(
        "sum_contributions",
        output.nbytes * len(contributions),
        body,
        lambda: f"{output.dtype}, {tuple(output.shape)}",
        timeout,
    )


def check_exact(op: ReduceOp) -> None:
    """Raise `Unsupported` for a reduction that has no reproducible form."""
    if op.name == "product":
        raise Unsupported("a reproducible product", "sum logarithms")


def reduce_exactly(transport: Transport, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
    """A reproducible all_reduce of a contiguous tensor, in place."""
    if not tensor.dtype.is_floating_point or op.name in _ORDER_FREE:
        transport.all_reduce(tensor, op, deadline)
        return
    given = arithmetic.before(tensor, op)
    _sum(transport, [given], [1] * transport.size, tensor, deadline)
    arithmetic.after(tensor, op, transport.size)


def _sum(
    transport: Transport,
    contributions: Sequence[Tensor],
    counts: Sequence[int],
    output: Tensor,
    deadline: float,
) -> None:
    """`counts[i]` is the number of rank i's contributions."""
    if sum(counts) > MOST_CONTRIBUTIONS:
        raise Unsupported(f"a reproducible sum of {sum(counts)} contributions", "add some of them beforehand")
    flat = output.view(-1)
    total, size, rank = flat.numel(), transport.size, transport.rank
    length = -(-total // size)
    bounds = [min(r * length, total) for r in range(size + 1)]
    spans = [slice(bounds[r], bounds[r + 1]) for r in range(size)]
    own = bounds[rank + 1] - bounds[rank]
    given = [torch.cat([c.view(-1)[span] for c in contributions]) if contributions else flat[:0] for span in spans]
    received = [torch.empty(count * own, dtype=flat.dtype, device=flat.device) for count in counts]
    transport.all_to_all(received, given, deadline)
    part = exact_sum(torch.cat(received).view(sum(counts), own))
    transport.all_gather([flat[span] for span in spans], part, deadline)


def exact_sum(rows: Tensor) -> Tensor:
    """The sum of a (contributions, elements) tensor over its rows; the same bits for any order of the rows."""
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[1])
    values = rows.double()
    largest = values.abs().amax(0)
    finite = torch.isfinite(largest)
    exponent = torch.frexp(torch.where(finite, largest, 0.0)).exponent
    scale = None
    if rows.dtype == torch.float64:
        huge = exponent > 1000
        if huge.any():
            scale = torch.where(huge, 2.0**-64, 1.0)
            values = values * scale
            exponent = exponent - 64 * huge.int()
    grids = 2 if rows.dtype == torch.float64 else 1
    result = torch.zeros_like(largest)
    for level in reversed(_slices(values, exponent, grids)):
        result += level
    if scale is not None:
        result /= scale
    result = result.to(rows.dtype)
    if not finite.all():
        result = torch.where(finite, result, _sum_of_specials(rows))
    return result


def _slices(values: Tensor, exponent: Tensor, grids: int) -> list[Tensor]:
    """The exact sums of what lies on each grid, coarsest first. |values| < 2^exponent, elementwise."""
    sums = []
    for _ in range(grids):
        pivot = _one_and_a_half_times_two_to(exponent + _CARRY_BITS)
        on_grid = (values + pivot) - pivot
        sums.append(on_grid.sum(0))
        values = values - on_grid
        exponent = exponent - _GRID_BITS
    return sums


def _one_and_a_half_times_two_to(exponent: Tensor) -> Tensor:
    """Exactly that, in float64, put together from its bits; the smallest normal number below the range."""
    return ((exponent.long() + 1023).clamp(1, 2046) << 52 | 1 << 51).view(torch.float64)


def _sum_of_specials(rows: Tensor) -> Tensor:
    """What a plain sum gives where a row is infinite or NaN."""
    up, down = torch.isposinf(rows).any(0), torch.isneginf(rows).any(0)
    nan = torch.isnan(rows).any(0) | (up & down)
    infinity = torch.where(up, torch.inf, -torch.inf).to(rows.dtype)
    return torch.where(nan, torch.full_like(infinity, torch.nan), infinity)
