"""Reproducible reductions: their bits depend on the values alone, not on the ranks, their order or the backend.

A sum is the exact sum, rounded once to its dtype. With two ranks and one tensor each, a plain all_reduce gives that
already, since IEEE addition of two numbers rounds correctly. Otherwise each rank owns a part of the result: an
all-to-all brings all contributions of a part to its owner, the owner adds them, and an all-gather distributes the
parts. It runs in segments, so that received data is still in the cache when it is added. A sum with NaN, or with
infinities of both signs, is torch's own NaN; one with an infinity is that infinity; a zero is negative if all values
are negative zeros. Complex numbers are summed as pairs of reals. A minimum or maximum that is zero is 0.0, never -0.0.

On the host, compiled code adds all elements with an exact sum that fits in two partial sums; blocks with other elements
are added here (docs/internals/message-collectives.md says how).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import torch

from holdfast.comms import _native, arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.overlap import extent, overlapping
from holdfast.comms.tensors.packing import packed, unpack
from holdfast.comms.transport.base import Transport

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Tensor = torch.Tensor

_SEGMENT_BYTES = 4 << 20
"""The size of one segment of the output."""

_CHOOSING = ("min", "max")
"""Reductions that return one of the values; which zero or NaN they return depends on the order."""


def sum_contributions(
    comm: Communicator, contributions: Sequence[Tensor], output: Tensor, timeout: float | None = None
) -> None:
    """Fill `output`, on every rank, with the sum of all contributions of all ranks; collective.

    Each rank passes any number of contributions, also none, each of `output`'s shape and a floating dtype. The result
    does not depend on how they are spread over the ranks. Raises ValueError and `Unsupported` before any byte moves.
    """
    target = comm._check.output(output, "output")
    shape = tuple(target.shape)
    terms = _checked_contributions(comm, contributions, target, lambda each: each.shape == target.shape, str(shape))

    def body(deadline: float) -> None:
        transport, flat = comm._transport, packed(target)
        counts = _counts_of_all(transport, len(terms), target.device, deadline)
        _sum(transport, _as_they_were(terms, flat, 0), counts, flat, deadline)
        unpack(flat, target)

    nbytes = target.nbytes * len(terms)
    comm.issue("sum_contributions", nbytes, body, lambda: f"{target.dtype}, {shape}", timeout)


def scatter_contributions(
    comm: Communicator,
    contributions: Sequence[Tensor],
    output: Tensor,
    *,
    parts: int = 0,
    timeout: float | None = None,
) -> None:
    """Fill `output`, on rank i, with part i of the sum of all contributions of all ranks; collective.

    The sum is divided into `parts` (0: one for each rank); on ranks from `parts` on, `output` is unchanged. Each
    contribution has `parts` times the elements of `output`; otherwise as `sum_contributions`, with the same bits.
    """
    parts = parts or comm.size
    if not 1 <= parts <= comm.size:
        raise ValueError(f"parts={parts}: it must be the number of ranks, {comm.size}")
    target = comm._check.output(output, "output")
    wanted = target.numel() * parts
    terms = _checked_contributions(
        comm, contributions, target, lambda each: each.numel() == wanted, f"of {wanted} elements"
    )

    def body(deadline: float) -> None:
        transport, flat = comm._transport, packed(target).view(-1)
        rows = _counts_of_all(transport, len(terms), target.device, deadline)
        written = flat if comm.rank < parts else flat[:0]
        given = [each.view(parts, flat.numel()) for each in _as_they_were(terms, written, comm.rank)]
        step = max(1, _SEGMENT_BYTES // flat.element_size() // parts)
        buffers = [flat.new_empty(count * min(step, flat.numel())) for count in rows]
        for start in range(0, flat.numel(), step):
            sent = [[each[r, start : start + step] for each in given] if r < parts else [] for r in range(comm.size)]
            _add_up(transport, sent, rows, buffers, written[start : start + step], deadline)
        if comm.rank < parts:
            unpack(flat.view(target.shape), target)

    nbytes = target.nbytes * parts * len(terms)
    words = f"{target.dtype}, {tuple(target.shape)}, {parts} parts"
    comm.issue("scatter_contributions", nbytes, body, lambda: words, timeout)


def _checked_contributions(
    comm: Communicator,
    contributions: Sequence[Tensor],
    output: Tensor,
    fits: Callable[[Tensor], bool],
    wanted: str,
) -> list[Tensor]:
    """The contributions as plain tensors.

    Raises ValueError and `Unsupported` unless all of them fit, and `output` can be summed exactly.
    """
    if not summable(output.dtype):
        raise Unsupported(f"a reproducible sum of {output.dtype}", "use float16, bfloat16, float32 or float64")
    terms = comm._check.operands(contributions, "contributions")
    for each in terms:
        if each.dtype != output.dtype or each.device != output.device or not fits(each):
            raise ValueError(
                f"a contribution is {each.dtype} {tuple(each.shape)} on {each.device}; with this output it must be "
                f"{output.dtype} {wanted} on {output.device}"
            )
    return terms


def _as_they_were(contributions: Sequence[Tensor], output: Tensor, part: int) -> list[Tensor]:
    """The contributions, packed: copies of those that the op would overwrite before it has read them.

    The op writes a segment of `output` once it has read that of every contribution; so `output` may be part number
    `part` of a contribution.
    """
    flats = [packed(each) for each in contributions]
    for number in overlapping(flats, [output]):
        own = flats[number].view(-1)[part * output.numel() : (part + 1) * output.numel()]
        if extent(own) != extent(output):
            flats[number] = flats[number].clone()
    return flats


def _counts_of_all(transport: Transport, count: int, device: torch.device, deadline: float) -> list[int]:
    counts = torch.empty(transport.size, dtype=torch.int64, device=device)
    transport.all_gather_single(counts, torch.full_like(counts[:1], count), deadline)
    found: list[int] = counts.tolist()
    return found


def check_exact(op: ReduceOp) -> None:
    """Raise `Unsupported` for a reduction without a reproducible form."""
    if op.name == "product":
        raise Unsupported("a reproducible product", "sum logarithms")


def reduce_exactly(transport: Transport, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
    """A reproducible all_reduce of a contiguous tensor, in place."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point or op.name in _CHOOSING:
        transport.all_reduce(tensor, op, deadline)
        if summable(tensor.dtype):
            tensor.add_(0.0)
            make_nans_alike(tensor)
        return
    given = arithmetic.prescale(tensor, op)
    if transport.size <= 2:
        if given is not tensor:
            tensor.copy_(given)
        transport.all_reduce(tensor, ReduceOp.SUM, deadline)
        make_nans_alike(tensor)
    else:
        _sum(transport, [given], [1] * transport.size, tensor, deadline)
    arithmetic.postscale(tensor, op, transport.size)


def _sum(
    transport: Transport,
    contributions: Sequence[Tensor],
    counts: Sequence[int],
    output: Tensor,
    deadline: float,
) -> None:
    """Sum all ranks' contributions into `output`, segment by segment. Rank i has `counts[i]` contributions."""
    flat = output.view(-1)
    given = [each.view(-1) for each in contributions]
    step = max(1, _SEGMENT_BYTES // flat.element_size())
    size, rank = transport.size, transport.rank
    own = -(-min(step, flat.numel()) // size)
    buffers = [flat.new_empty(count * own) for count in counts]
    for start in range(0, flat.numel(), step):
        segment = flat[start : start + step]
        edges = [min(r * -(-segment.numel() // size), segment.numel()) for r in range(size + 1)]
        own_part = segment[edges[rank] : edges[rank + 1]]
        parts = [[each[start + edges[r] : start + edges[r + 1]] for each in given] for r in range(size)]
        _add_up(transport, parts, counts, buffers, own_part, deadline)
        transport.all_gather([segment[edges[r] : edges[r + 1]] for r in range(size)], own_part, deadline)


def _add_up(
    transport: Transport,
    parts: Sequence[Sequence[Tensor]],
    counts: Sequence[int],
    buffers: Sequence[Tensor],
    own_part: Tensor,
    deadline: float,
) -> None:
    """Fill `own_part` with the sum of all ranks' contributions to it.

    `parts[r]` are this rank's contributions to the part of rank r. Those of rank r, `counts[r]` tensors, arrive in
    `buffers[r]`.
    """
    width = own_part.numel()
    sent = [part[0] if len(part) == 1 else torch.cat(tuple(part)) if part else own_part[:0] for part in parts]
    received = [buffer[: count * width] for buffer, count in zip(buffers, counts, strict=True)]
    transport.all_to_all(received, sent, deadline)
    rows = [
        buffer[i * width : (i + 1) * width]
        for buffer, count in zip(received, counts, strict=True)
        for i in range(count)
    ]
    add_exactly(rows, own_part)


_BLOCK = 1 << 10
"""The number of elements of a block on the host."""

_COMPILED = 256
"""The largest number of contributions that the compiled code accepts."""


def add_exactly(contributions: Sequence[Tensor], output: Tensor) -> None:
    """Set `output` to the correctly rounded sum of `contributions`, flat tensors of its size and dtype.

    `output` may be one of the contributions.
    """
    if not contributions:
        output.zero_()
        return
    if len(contributions) <= 2:
        if len(contributions) == 2:
            torch.add(*contributions, out=output)
        elif contributions[0] is not output:
            output.copy_(contributions[0])
        make_nans_alike(output)
        return
    step = _BLOCK if output.device.type == "cpu" else max(1, output.numel())
    count = min(step, output.numel())
    scratch = [torch.empty(count, dtype=torch.float64, device=output.device) for _ in range(5)]
    start = _done(contributions, output, 0)
    while start < output.numel():
        blocks = [each[start : start + step] for each in contributions]
        _add_block(blocks, output[start : start + step], [each[: blocks[0].numel()] for each in scratch])
        start = _done(contributions, output, start + step)


def _done(contributions: Sequence[Tensor], output: Tensor, start: int) -> int:
    """Sum with the compiled code from `start` on; return the element at which it stopped.

    It stops before a block with an element that needs more than two partial sums.
    """
    if output.device.type != "cpu" or len(contributions) > _COMPILED or start >= output.numel():
        return start
    dtype, offset = str(output.dtype).removeprefix("torch."), start * output.element_size()
    addresses = tuple(each.data_ptr() + offset for each in contributions)
    return start + _native.sum_exactly(dtype, output.data_ptr() + offset, output.numel() - start, addresses)


def make_nans_alike(tensor: Tensor) -> None:
    """Replace every NaN of a contiguous tensor by torch's own: an addition's NaN depends on the operands' order."""
    if tensor.device.type == "cpu":
        _native.make_nans_alike(str(tensor.dtype).removeprefix("torch."), tensor.data_ptr(), tensor.numel())
    else:
        tensor.masked_fill_(torch.isnan(tensor), math.nan)


def _add_block(blocks: Sequence[Tensor], output: Tensor, scratch: Sequence[Tensor]) -> None:
    total = scratch[0].copy_(blocks[0])
    partials = [total]
    if _exact_in_double(blocks):
        for block in blocks[1:]:
            total += block
    else:
        _add_keeping(blocks[1:], partials, scratch[1:])
    finite = torch.isfinite(total)
    for other in partials[1:]:
        finite &= torch.isfinite(other)
    whole = bool(finite.all())
    if len(partials) > 1:
        total = _rounded(partials, output.dtype)
    _narrow(total, output)
    if not whole:
        _add_specials(blocks, output, ~finite)


def _exact_in_double(blocks: Sequence[Tensor]) -> bool:
    """Whether float64 holds every possible sum of these blocks exactly: float16 values span 40 bits."""
    return blocks[0].dtype == torch.float16 and (len(blocks) - 1).bit_length() <= 13


def _add_keeping(blocks: Sequence[Tensor], partials: list[Tensor], scratch: Sequence[Tensor]) -> None:
    """Add `blocks` to `partials` exactly: each partial sum's rounding error is added to the next one.

    Appends partial sums as needed.
    """
    term, total, back, lost = scratch
    for block in blocks:
        term.copy_(block)
        for place, partial in enumerate(partials):
            torch.add(partial, term, out=total)
            torch.sub(total, partial, out=back)
            torch.sub(total, back, out=lost)
            torch.sub(partial, lost, out=lost)
            torch.sub(term, back, out=back)
            torch.add(lost, back, out=term)
            partial.copy_(total)
            if not bool(term.any()):
                break
            if place == len(partials) - 1:
                partials.append(term.clone())
                break


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b and its rounding error. Where b is zero, `a` itself, which may be a negative zero."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    nothing = b == 0
    return torch.where(nothing, a, total), torch.where(nothing, 0.0, lost)


def _rounded(partials: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Round the exact total of partial sums to one float64: to nearest if `dtype` is float64, else to odd."""
    parts = list(partials)
    moved = True
    while moved:
        moved = False
        for i in range(len(parts) - 1, 0, -1):
            high, low = _two_sum(parts[i - 1], parts[i])
            same = (high == parts[i - 1]) | ~torch.isfinite(high)
            moved = moved or not bool(same.all())
            parts[i - 1], parts[i] = high, low
    high, low = parts[0], parts[1]
    rest = parts[2] if len(parts) > 2 else torch.zeros_like(low)
    if dtype != torch.float64:
        return _odd(high, low)
    # `high` is the nearest, except in a tie that `rest` breaks the other way
    other = high + 2 * low
    tie = (other - high == 2 * low) & (low != 0) & (torch.sign(rest) == torch.sign(low))
    return torch.where(tie, other, high)


def _odd(value: Tensor, rest: Tensor) -> Tensor:
    """Round `value` + `rest` to odd: of the two float64 around it, the odd one. `value` is the nearest float64."""
    bits = value.view(torch.int64)
    outwards = (rest > 0) == (value > 0)
    even = (rest != 0) & (bits & 1 == 0) & (value != 0)
    return torch.where(even, torch.where(outwards, bits + 1, bits - 1), bits).view(torch.float64)


def _narrow(total: Tensor, output: Tensor) -> None:
    """Set `output` to `total`, rounded once.

    torch rounds to 16 bits by way of float32, so the float32 value must be exact or rounded to odd.
    """
    if output.dtype.itemsize > 2:
        output.copy_(total)
        return
    single = total.float()
    there = single.double()
    if not torch.equal(there, total):
        bits = single.view(torch.int32)
        even = (there != total) & (bits & 1 == 0) & ~torch.isnan(total)
        outwards = total.abs() > there.abs()
        single = torch.where(even, torch.where(outwards, bits + 1, bits - 1), bits).view(torch.float32)
    output.copy_(single)


def _add_specials(blocks: Sequence[Tensor], output: Tensor, where: Tensor) -> None:
    """Recompute the elements `where` a value is infinite or NaN, or a partial sum overflowed."""
    (places,) = torch.nonzero(where, as_tuple=True)
    rows = torch.stack([block[places] for block in blocks])
    up, down = torch.isposinf(rows).any(0), torch.isneginf(rows).any(0)
    result = torch.where(up, math.inf, -math.inf).to(output.dtype)
    result = result.masked_fill(torch.isnan(rows).any(0) | (up & down), math.nan)
    for column in torch.nonzero(torch.isfinite(rows).all(0)).view(-1).tolist():
        result[column] = _fraction_sum(rows[:, column].tolist())
    output[places] = result


def _fraction_sum(numbers: Sequence[float]) -> float:
    """The exact sum by fractions, for the rare sums with an overflow in between."""
    total = sum(map(Fraction, numbers), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def exact_sum(rows: Tensor) -> Tensor:
    """The correctly rounded sum of a (contributions, elements) tensor over its rows."""
    output = rows.new_empty(rows.shape[1])
    add_exactly(list(rows), output)
    return output


def summable(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` can be summed exactly."""
    return dtype.is_floating_point and dtype in arithmetic.REDUCIBLE
