"""`fake`: one rank of a communicator without the others, for dry runs. It moves nothing, and counts what would move.

The other ranks are taken to be as this one: they pass the same tensors. So a sum is this rank's tensor times the number
of ranks, and what is gathered are copies of it. What only another rank could know (a broadcast's source, a receive)
stays as it is. `comm.transport.calls` has the shapes and bytes. "auto" never takes it, and it must be asked for alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.comms import arithmetic
from holdfast.comms.arithmetic import REDUCIBLE
from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, hookimpl
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, Transport

Tensor = torch.Tensor
Messages = Sequence[tuple[Tensor, int, int]]


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One kind of call: an op on tensors of these shapes. `nbytes` are those that this rank passes in each."""

    op: str
    dtype: torch.dtype | None
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class FakeTransport(Transport):
    """Counts ops: `calls` has how often each was called, with which shapes and bytes."""

    medium = "nothing"

    def __init__(self, context: Context) -> None:
        self.rank, self.size = context.rank, context.size
        self.calls: Counter[FakeCall] = Counter()
        self._error: HoldfastError | None = None

    def bytes_of(self, op: str) -> int:
        """The bytes that this rank has passed to all calls of an op."""
        return sum(call.nbytes * times for call, times in self.calls.items() if call.op == op)

    def _count(self, op: str, *tensors: Tensor) -> None:
        if self._error is not None:
            raise self._error.again()
        dtype = tensors[0].dtype if tensors else None
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.calls[FakeCall(op, dtype, shapes, sum(tensor.nbytes for tensor in tensors))] += 1

    def _reduced(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """What all ranks' equal tensors reduce to."""
        scaled = arithmetic.prescale(tensor, op)
        if op.name in ("min", "max", "band", "bor"):
            result = scaled.clone()
        elif op.name == "bxor":
            result = scaled.clone() if self.size % 2 else torch.zeros_like(scaled)
        else:
            result = scaled**self.size if op.name == "product" else scaled * self.size
        result = result.to(tensor.dtype)
        arithmetic.postscale(result, op, self.size)
        return result

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        self._count("all_reduce", tensor)
        tensor.copy_(self._reduced(tensor, op))

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        self._count("reduce", tensor)
        if self.rank == dst:
            tensor.copy_(self._reduced(tensor, op))

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        self._count("reduce_scatter", *inputs)
        output.view(-1).copy_(self._reduced(inputs[self.rank], op).view(-1))

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        self._count("broadcast", *([tensor] if self.rank == src else []))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        self._count("all_gather", tensor)
        _copy_to_each(outputs, tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        self._count("all_to_all", *inputs)
        _copy_to_each(outputs, inputs[self.rank])

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, deadline: float) -> None:
        self._count("gather", tensor)
        _copy_to_each(outputs or (), tensor)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, deadline: float) -> None:
        self._count("scatter", *(inputs or ()))
        if inputs is not None:
            tensor.view(-1).copy_(inputs[self.rank].view(-1))

    def barrier(self, deadline: float) -> None:
        self._count("barrier")

    # -- point to point

    def send(self, tensor: Tensor, dst: int, tag: int, deadline: float) -> None:
        self._count("send", tensor)

    def recv(self, tensor: Tensor, src: int, tag: int, deadline: float) -> None:
        self._count("recv")

    def batch_send_recv(self, sends: Messages, recvs: Messages, deadline: float) -> None:
        self._count("batch_send_recv", *(tensor for tensor, _, _ in sends))

    # -- the end

    def abort(self, error: HoldfastError) -> None:
        self._error = self._error or error

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


def _copy_to_each(outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Copy `tensor` to the outputs of its size. Of another size there is no known tensor."""
    for output in outputs:
        if output.numel() == tensor.numel():
            output.view(-1).copy_(tensor.view(-1))


def connect(context: Context) -> FakeTransport:
    """Make this rank's transport. The others are not asked."""
    if context.device.type != "cpu":
        raise Unsupported(f"fake on {context.device}", "pass a CPU device")
    return FakeTransport(context)


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="fake",
            api=API_VERSION,
            description="one rank without the others, for dry runs: counts shapes and bytes, moves nothing",
            capabilities=Capabilities(
                reduces={"cpu": names(REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                peerless=True,
                finds_failures=False,
            ),
            probe=Available,
            connect=connect,
        )
    ]
