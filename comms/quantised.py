"""All-reduce in eight bits: contributions and sums travel as fp8 with scales.

128 elements have one scale, a power of two. Each rank owns a part of the result: an all-to-all brings the others'
contributions to the owner, which adds them in float32, in rank order, and an all-gather distributes the sums, cast
again. A rank sends a quarter of the traffic of float32, half of bfloat16's.

**Bound.** With m_r the largest magnitude of rank r's contribution in the 128 elements around an element, its sum is
wrong by at most 0.13 times the m_r of all ranks together; an average by that over the number of ranks. float16 and
bfloat16 are rounded once more. An infinity, which e4m3 has not, becomes NaN.

**Error feedback.** An `ErrorFeedback` keeps what a rank's contributions and its part of the sum lost, and adds it to
the next ones. So the errors of many ops do not add up: the sum of all results is wrong by no more than the residuals
of all ranks together, which stay below 0.15 times the largest m_r of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from holdfast.comms.codecs import float8_blocks
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.tensors.overlap import extent, overlapping
from holdfast.comms.tensors.packing import packed, parts, unpack
from holdfast.comms.transport.base import Transport

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Tensor = torch.Tensor

_BLOCK = float8_blocks.BLOCK
_SEGMENT = 1 << 15
"""Elements that are added and cast at a time, a multiple of `_BLOCK`: their float32 stays in the cache."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ErrorFeedback:
    """What a rank has lost of one tensor so far, for `all_reduce_quantised`; one for each tensor that is reduced.

    An op that raises leaves it as it was. It belongs to this rank and outlives a communicator; the residual of a rank
    that dies is lost.
    """

    def __init__(self) -> None:
        self._residual: Tensor | None = None
        self._before: Tensor | None = None

    @property
    def residual(self) -> Tensor | None:
        """The residual, flat, in float32; None before the first op."""
        return self._residual

    def undo(self) -> None:
        """Return to the residual before the last op: its result is discarded, because the op failed elsewhere."""
        self._residual = self._before

    def begin(self, elements: int) -> Tensor:
        """The memory for the residual of the next op. What `undo` could return to is given up."""
        spare, self._before = self._before, self._residual
        fits = spare is not None and spare is not self._residual and spare.numel() == elements
        return spare if fits and spare is not None else torch.empty(elements, dtype=torch.float32, device="cpu")

    def end(self, residual: Tensor) -> None:
        """Take the residual of an op that has succeeded."""
        self._before, self._residual = self._residual, residual


def all_reduce_quantised(
    comm: Communicator,
    tensor: Tensor,
    feedback: ErrorFeedback | None = None,
    op: ReduceOp = ReduceOp.SUM,
    timeout: float | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place, through fp8; every rank gets equal bits, and all backends the same.

    It is collective. `tensor` is float32, float16 or bfloat16 in CPU memory, `op` a sum or an average. Raises
    `Unsupported` for others, and ValueError for the `feedback` of another size, before any byte moves. An op that fails
    leaves `tensor` and `feedback` as they were.
    """
    target = comm._check.output(tensor)
    _issue(comm, "all_reduce_quantised", reduce_quantised, target, target, feedback, op, timeout)


def reduce_scatter_quantised(
    comm: Communicator,
    output: Tensor,
    tensor: Tensor,
    feedback: ErrorFeedback | None = None,
    op: ReduceOp = ReduceOp.SUM,
    timeout: float | None = None,
) -> None:
    """Reduce `tensor` through fp8, and put its part i into rank i's `output`, which has 1/size of its elements.

    It is collective. The sum itself is not quantised: with m_r as above, an element is wrong by at most 0.065 times the
    m_r of the other ranks together. Dtypes, ops, errors and `feedback`, which is for `tensor`, are as in
    `all_reduce_quantised`.
    """
    target, source = comm._check.output(output, "output"), comm._check.operand(tensor)
    comm._check.same_dtype(source, target)
    comm._check.whole(source, target, "tensor", "output's")
    _issue(comm, "reduce_scatter_quantised", reduce_scatter_parts, source, target, feedback, op, timeout)


def _issue(
    comm: Communicator,
    name: str,
    run: Callable[[Transport, Tensor, Contribution, Tensor | None, int, float], None],
    tensor: Tensor,
    target: Tensor,
    feedback: ErrorFeedback | None,
    op: ReduceOp,
    timeout: float | None,
) -> None:
    """Check what both ops need, and issue one: `run(transport, output, contribution, lost, count, deadline)`."""
    if tensor.dtype not in _DTYPES or comm.device.type != "cpu":
        raise Unsupported(f"a quantised sum of {tensor.dtype} on {comm.device}", "use float32 or less, on the CPU")
    if op.name not in ("sum", "avg"):
        raise Unsupported(f"a quantised {op.name}", "only sums and averages are quantised")
    residual = None if feedback is None else feedback.residual
    if residual is not None and residual.numel() != tensor.numel():
        raise ValueError(
            f"the feedback has {residual.numel()} elements, the tensor {tensor.numel()}; keep one for each tensor"
        )

    def body(deadline: float) -> None:
        flat = packed(target).view(-1)
        given = flat if tensor is target else packed(tensor).view(-1)
        in_place = given is flat or extent(flat) == extent(parts(given, comm.size)[comm.rank])
        if not in_place and overlapping([given], [flat]):
            given = given.clone()
        lost = None if feedback is None else feedback.begin(given.numel())
        count = comm.size if op.name == "avg" else 1
        run(comm._transport, flat, Contribution(given, residual), lost, count, deadline)
        unpack(flat.view(target.shape), target)
        if feedback is not None and lost is not None:
            feedback.end(lost)

    words = f"{op.name}, {target.dtype}, {tuple(target.shape)}"
    comm.issue(name, tensor.nbytes, body, lambda: words, timeout)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A rank's flat tensor, and the residual that is added to it."""

    tensor: Tensor
    residual: Tensor | None

    def segments(self, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """For each segment of the elements from `begin` to `end`: where it starts, and a copy of it in float32."""
        scratch = torch.empty(min(_SEGMENT, end - begin), dtype=torch.float32, device="cpu")
        for start in range(begin, end, _SEGMENT):
            segment = slice(start, min(start + _SEGMENT, end))
            values = scratch[: segment.stop - start]
            values.copy_(self.tensor[segment])
            if self.residual is not None:
                values += self.residual[segment]
            yield start, values


class _QuantisedPart:
    """A part of a tensor on the wire: the exponents of its blocks, then its codes."""

    def __init__(self, elements: int) -> None:
        exponents = 2 * float8_blocks.blocks_of(elements)
        self.data = torch.empty(exponents + elements, dtype=torch.uint8, device="cpu")
        self._exponents = self.data[:exponents].view(torch.int16).view(1, -1)
        self._codes = self.data[exponents:].view(torch.float8_e4m3fn).view(1, -1)

    def encode(self, start: int, source: Tensor, lost: Tensor | None, weight: int) -> None:
        """Write elements from `start` on, a multiple of a block; what they lose, times `weight`, goes to `lost`.

        Nothing is lost of numbers that are not finite, so that one of them does not spoil all later ops.
        """
        codes, exponents = self._at(start, source.numel())
        float8_blocks.encode(source.view(1, -1), codes, exponents)
        if lost is not None:
            lost = lost[: source.numel()]
            self.decode(start, lost)
            torch.sub(source, lost, out=lost).mul_(weight).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, start: int, into: Tensor) -> None:
        """Read elements from `start` on, a multiple of a block."""
        codes, exponents = self._at(start, into.numel())
        float8_blocks.decode(codes, exponents, into.view(1, -1), 0, min(_BLOCK, into.numel()))

    def _at(self, start: int, elements: int) -> tuple[Tensor, Tensor]:
        block = start // _BLOCK
        blocks = slice(block, block + float8_blocks.blocks_of(elements))
        return self._codes[:, start : start + elements], self._exponents[:, blocks]


def reduce_quantised(
    transport: Transport, output: Tensor, given: Contribution, lost: Tensor | None, count: int, deadline: float
) -> None:
    """Set `output` to the sum over the ranks, divided by `count`, and `lost` to this rank's residual."""
    size, rank, elements = transport.size, transport.rank, given.tensor.numel()
    width = -(-float8_blocks.blocks_of(elements) // size) * _BLOCK
    edges = list(pairwise(min(part * width, elements) for part in range(size + 1)))
    received = _exchange(transport, given, lost, edges, deadline)
    begin, end = edges[rank]
    results = [_QuantisedPart(end - begin) for begin, end in edges]
    for start, own in given.segments(begin, end):
        total = _total(received, rank, start - begin, own)
        total /= count
        results[rank].encode(start - begin, total, None if lost is None else lost[start:], count)
    transport.all_gather([each.data for each in results], results[rank].data, deadline)
    for message, (begin, end) in zip(results, edges, strict=True):
        for start in range(begin, end, _SEGMENT):
            message.decode(start - begin, output[start : min(start + _SEGMENT, end)])


def reduce_scatter_parts(
    transport: Transport, output: Tensor, given: Contribution, lost: Tensor | None, count: int, deadline: float
) -> None:
    """Set `output` to this rank's part of the sum over the ranks, divided by `count`, and `lost` to the residual."""
    rank, width = transport.rank, output.numel()
    edges = [(part * width, (part + 1) * width) for part in range(transport.size)]
    received = _exchange(transport, given, lost, edges, deadline)
    begin, end = edges[rank]
    if lost is not None:
        lost[begin:end] = 0.0  # the owner's contribution is exact
    for start, own in given.segments(begin, end):
        total = _total(received, rank, start - begin, own)
        output[start - begin : start - begin + own.numel()] = total.div_(count)


def _exchange(
    transport: Transport,
    given: Contribution,
    lost: Tensor | None,
    edges: Sequence[tuple[int, int]],
    deadline: float,
) -> list[_QuantisedPart]:
    """Send each rank the elements of its part; the others' contributions to this rank's part."""
    rank = transport.rank
    sent = [_QuantisedPart(0 if part == rank else end - begin) for part, (begin, end) in enumerate(edges)]
    for part, (begin, end) in enumerate(edges):
        for start, values in given.segments(begin, end) if part != rank else ():
            sent[part].encode(start - begin, values, None if lost is None else lost[start:], 1)
    begin, end = edges[rank]
    received = [_QuantisedPart(0 if source == rank else end - begin) for source in range(transport.size)]
    transport.all_to_all([each.data for each in received], [each.data for each in sent], deadline)
    return received


def _total(received: Sequence[_QuantisedPart], rank: int, start: int, own: Tensor) -> Tensor:
    """The sum of all contributions to some elements, in rank order."""
    total, other = torch.empty_like(own), torch.empty_like(own)
    for source, message in enumerate(received):
        into = other if source else total
        if source == rank:
            into.copy_(own)
        else:
            message.decode(start, into)
        if source:
            total += other
    return total
