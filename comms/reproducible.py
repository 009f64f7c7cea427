"""Reproducible reductions: their bits depend on the values alone, not on the ranks, their order or the backend.

A sum is the exact sum, rounded once (see `exact_sum`). With two ranks and one tensor each, a plain all_reduce gives
that already, since IEEE addition of two numbers rounds correctly. Otherwise each rank owns a part of the result: an
all-to-all brings all contributions of a part to its owner, the owner adds them, and an all-gather distributes the
parts. That moves as many bytes as an ordinary all_reduce. It runs in segments, so that received data is still in the
cache when it is added. A sum with NaN, or with infinities of both signs, is NaN; one with an infinity is that infinity.
Complex numbers are summed as pairs of reals. A minimum or maximum that is zero is 0.0, never -0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.comms import arithmetic
from holdfast.comms.errors import Unsupported
from holdfast.comms.exact.exact_sum import add_exactly, make_nans_alike, summable
from holdfast.comms.ops import ReduceOp
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
    shape = tuple(output.shape)
    _check_contributions(comm, contributions, output, lambda each: each.shape == output.shape, str(shape))

    def body(deadline: float) -> None:
        transport, flat = comm._transport, packed(output)
        counts = _counts_of_all(transport, len(contributions), output.device, deadline)
        _sum(transport, [packed(each) for each in contributions], counts, flat, deadline)
        unpack(flat, output)

    nbytes = output.nbytes * len(contributions)
    comm.issue("sum_contributions", nbytes, body, lambda: f"{output.dtype}, {shape}", timeout)


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
    wanted = output.numel() * parts
    _check_contributions(comm, contributions, output, lambda each: each.numel() == wanted, f"of {wanted} elements")

    def body(deadline: float) -> None:
        transport, flat = comm._transport, packed(output).view(-1)
        rows = _counts_of_all(transport, len(contributions), output.device, deadline)
        given = [packed(each).view(parts, flat.numel()) for each in contributions]
        step = max(1, _SEGMENT_BYTES // flat.element_size() // parts)
        buffers = [flat.new_empty(count * min(step, flat.numel())) for count in rows]
        for start in range(0, flat.numel(), step):
            sent = [[each[r, start : start + step] for each in given] if r < parts else [] for r in range(comm.size)]
            own_part = flat[start : start + step] if comm.rank < parts else flat[:0]
            _add_up(transport, sent, rows, buffers, own_part, deadline)
        if comm.rank < parts:
            unpack(flat.view(output.shape), output)

    nbytes = output.nbytes * parts * len(contributions)
    words = f"{output.dtype}, {tuple(output.shape)}, {parts} parts"
    comm.issue("scatter_contributions", nbytes, body, lambda: words, timeout)


def _check_contributions(
    comm: Communicator,
    contributions: Sequence[Tensor],
    output: Tensor,
    fits: Callable[[Tensor], bool],
    wanted: str,
) -> None:
    """Raise ValueError and `Unsupported` unless all contributions fit, and `output` can be summed exactly."""
    comm.check_operand(output, "output")
    if not summable(output.dtype):
        raise Unsupported(f"a reproducible sum of {output.dtype}", "use float16, bfloat16, float32 or float64")
    for each in contributions:
        if each.dtype != output.dtype or each.device != output.device or not fits(each):
            raise ValueError(
                f"a contribution is {each.dtype} {tuple(each.shape)} on {each.device}; with this output it must be "
                f"{output.dtype} {wanted} on {output.device}"
            )


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
