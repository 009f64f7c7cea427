"""Sums whose bits depend on the values alone: not on how many ranks hold them, their order, nor the backend.

The result is the exact sum, rounded once (see `exact_sum`). Two ranks with a tensor each need nothing special: adding
two numbers rounds correctly wherever it is done. Else each rank owns a part of the result: all contributions to it come
to the owner (an all-to-all), who adds them up; the parts then go to all (an all-gather). That is the volume of an
ordinary all_reduce. It is done in segments, so that what arrives is still in the cache when it is added. A sum with
NaN, or with infinities of both signs, is NaN; one with an infinity is that infinity. Complex numbers are summed part by
part. A minimum or maximum that is zero is 0.0, never -0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""How much of the output is worked on at a time."""

_CHOOSING = ("min", "max")
"""These give one of the values: which zero, and which NaN, depends on their order."""


def sum_contributions(
    comm: Communicator, contributions: Sequence[Tensor], output: Tensor, timeout: float | None = None
) -> None:
    """Fill `output`, on every rank, with the sum of all contributions of all ranks; collective.

    Each rank gives as many contributions as it likes, none included, each of `output`'s shape and a floating dtype:
    the result does not depend on who holds which. Raises ValueError and `Unsupported` before any byte moves.
    """
    if not summable(output.dtype):
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


def scatter_contributions(
    comm: Communicator,
    contributions: Sequence[Tensor],
    output: Tensor,
    *,
    parts: int = 0,
    timeout: float | None = None,
) -> None:
    """Fill `output`, on rank i, with the i-th of so many `parts` (0: as many as there are ranks) of the sum of all
    contributions of all ranks; collective. Ranks from `parts` on get nothing: their `output` stays as it is.

    As `sum_contributions`, with contributions of `parts` times `output`'s elements. The parts hold the same bits as the
    whole sum would.
    """
    parts = parts or comm.size
    if not 1 <= parts <= comm.size:
        raise ValueError(f"parts={parts}: there are {comm.size} ranks to get one each")
    if not summable(output.dtype):
        raise Unsupported(f"a reproducible sum of {output.dtype}", "use float16, bfloat16, float32 or float64")
    for tensor in contributions:
        if (tensor.numel(), tensor.dtype, tensor.device) != (output.numel() * parts, output.dtype, output.device):
            raise ValueError(
                f"a contribution is {tensor.numel()} x {tensor.dtype} on {tensor.device}; it must be "
                f"{parts} times output's {output.numel()} x {output.dtype} on {output.device}"
            )

    def body(deadline: float) -> None:
        transport = comm._transport
        counts = [torch.zeros(1, dtype=torch.int64, device=output.device) for _ in range(comm.size)]
        transport.all_gather(counts, torch.full_like(counts[0], len(contributions)), deadline)
        flat = packed(output).view(-1)
        given = [packed(each).view(parts, flat.numel()) for each in contributions]
        step = max(1, _SEGMENT_BYTES // flat.element_size() // parts)
        buffers = [flat.new_empty(int(count.item()) * min(step, flat.numel())) for count in counts]
        rows = [int(count.item()) for count in counts]
        for start in range(0, flat.numel(), step):
            sent = [[each[r, start : start + step] for each in given] if r < parts else [] for r in range(comm.size)]
            mine = flat[start : start + step] if comm.rank < parts else flat[:0]
            _add_up(transport, sent, rows, buffers, mine, deadline)
        if comm.rank < parts:
            unpack(flat.view(output.shape), output)

    comm.issue(
        "scatter_contributions",
        output.nbytes * parts * len(contributions),
        body,
        lambda: f"{output.dtype}, {tuple(output.shape)}, {parts} parts",
        timeout,
    )


def check_exact(op: ReduceOp) -> None:
    """Raise `Unsupported` for a reduction that has no reproducible form."""
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
    given = arithmetic.before(tensor, op)
    if transport.size <= 2:
        if given is not tensor:
            tensor.copy_(given)
        transport.all_reduce(tensor, ReduceOp.SUM, deadline)
        make_nans_alike(tensor)
    else:
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
    flat = output.view(-1)
    given = [each.view(-1) for each in contributions]
    step = max(1, _SEGMENT_BYTES // flat.element_size())
    size, rank = transport.size, transport.rank
    own = -(-min(step, flat.numel()) // size)
    buffers = [flat.new_empty(count * own) for count in counts]
    for start in range(0, flat.numel(), step):
        segment = flat[start : start + step]
        edges = [min(r * -(-segment.numel() // size), segment.numel()) for r in range(size + 1)]
        mine = segment[edges[rank] : edges[rank + 1]]
        parts = [[each[start + edges[r] : start + edges[r + 1]] for each in given] for r in range(size)]
        _add_up(transport, parts, counts, buffers, mine, deadline)
        transport.all_gather([segment[edges[r] : edges[r + 1]] for r in range(size)], mine, deadline)


def _add_up(
    transport: Transport,
    parts: Sequence[Sequence[Tensor]],
    counts: Sequence[int],
    buffers: Sequence[Tensor],
    mine: Tensor,
    deadline: float,
) -> None:
    """Fill `mine` with the sum of what all ranks have for this one: `counts[r]` tensors of rank r, by way of
    `buffers[r]`. `parts[r]` are the tensors that this rank has for rank r.
    """
    width = mine.numel()
    sent = [part[0] if len(part) == 1 else torch.cat(tuple(part)) if part else mine[:0] for part in parts]
    received = [buffer[: count * width] for buffer, count in zip(buffers, counts, strict=True)]
    transport.all_to_all(received, sent, deadline)
    rows = [
        buffer[i * width : (i + 1) * width]
        for buffer, count in zip(received, counts, strict=True)
        for i in range(count)
    ]
    add_exactly(rows, mine)
