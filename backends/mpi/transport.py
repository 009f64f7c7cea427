"""Collectives of Open MPI itself, by its nonblocking calls, where it has them and they are fast.

The algorithms of `MessageTransport` run the rest: what MPI lacks (16-bit floats, minima that keep NaNs), and what it
does slowly (large reductions). Every choice depends only on what all ranks know alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from holdfast.backends.mpi.base import MpiMessages, abandon
from holdfast.backends.mpi.buffers import buffer_of, copy_out, counts, gathered_buffer, receive_buffer
from holdfast.comms import arithmetic
from holdfast.comms._native import OpCall
from holdfast.comms.algorithms.message_passing.algorithms import segmented_all_reduce
from holdfast.comms.ops import ReduceOp
from holdfast.comms.plan import OpPlan
from holdfast.comms.transport.base import Context, Transport

Tensor = torch.Tensor

STAGED_BYTES = 8 << 10
"""Up to this size, a persistent all_reduce on its own buffer, with two copies, is faster than a nonblocking one."""
MOST_PREPARED = 64
"""The number of persistent requests of a communicator: the first sizes, datatypes and operations that it meets."""
SEGMENTED_BYTES = 24 << 20
"""From this size on, holdfast's segmented all_reduce is faster than MPI's."""
PART_BYTES = 1 << 20
GATHERED_BYTES = 1 << 16
"""From this size on, a ring of messages is faster than MPI's nonblocking all_gather (not than its blocking one)."""
SCATTERED_BYTES = 1 << 18
"""From this size on, pairwise exchange is faster than MPI's reduce_scatter."""

# MPI's datatypes and operations where it reduces as torch does. The 16-bit floats have no datatype, and its MIN and MAX
# of floats drop NaNs, which torch and numpy keep: holdfast's own algorithms run those over MPI's messages.
_INTEGERS = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_FLOATS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_SUMS = {"sum": MPI.SUM, "avg": MPI.SUM, "premul_sum": MPI.SUM, "product": MPI.PROD}
_ORDERS = {"min": MPI.MIN, "max": MPI.MAX, "band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
_OF_BOOL = {"sum": MPI.MAX, "product": MPI.MIN, **_ORDERS}

Native = tuple[MPI.Datatype, MPI.Op]

_NATIVE: dict[tuple[torch.dtype, str], Native] = {
    **{(dtype, name): (mpi, op) for dtype, mpi in _FLOATS.items() for name, op in _SUMS.items()},
    **{(dtype, name): (mpi, op) for dtype, mpi in _INTEGERS.items() for name, op in (_SUMS | _ORDERS).items()},
    **{(torch.bool, name): (MPI.UINT8_T, op) for name, op in _OF_BOOL.items()},
}


class MpiTransport(MpiMessages):
    """An MPI communicator's collectives."""

    def __init__(self, context: Context) -> None:
        self._prepared: dict[tuple[torch.dtype, str, int], OpCall] = {}
        self._requests: list[tuple[MPI.Prequest, bytearray]] = []
        self._segmented_bytes: int = context.hints.get("segmented_bytes", SEGMENTED_BYTES)
        super().__init__(context)

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        kind = _native_op(tensor.dtype, op)
        large = tensor.nbytes >= self._segmented_bytes and self.size > 1
        if kind is None and not large:
            super().all_reduce(tensor, op, deadline)
            return
        scaled = arithmetic.prescale(tensor, op)
        if scaled is not tensor:
            tensor.copy_(scaled)
        if large:
            exchange = self._exchange("all_reduce", deadline)
            segmented_all_reduce(exchange, tensor.view(-1), op, PART_BYTES)
        elif (prepared := self._prepare(tensor.dtype, op, tensor.nbytes)) is not None:
            prepared(tensor, deadline)
        elif kind is not None:
            mpi, reduce = kind
            given = MPI.IN_PLACE, [buffer_of(tensor), mpi], reduce
            self._run("all_reduce", self._comm.Iallreduce, given, deadline, tensor)
        arithmetic.postscale(tensor, op, self.size)

    def _prepare(self, dtype: torch.dtype, op: ReduceOp, nbytes: int) -> OpCall | None:
        """A persistent all_reduce of MPI for `nbytes` bytes; None if each op has to begin a new request.

        MPI requires all ranks to make the same ones in the same order. They do: each is made by the first such op, on
        the fast path or the slow one.
        """
        form, kind = (dtype, op.name, nbytes), _native_op(dtype, op)
        if form in self._prepared:
            return self._prepared[form]
        if kind is None or not 0 < nbytes <= STAGED_BYTES or len(self._prepared) == MOST_PREPARED:
            return None
        stage = bytearray(nbytes)
        try:
            request = self._comm.Allreduce_init(MPI.IN_PLACE, [stage, kind[0]], kind[1])
        except MPI.Exception as error:
            raise self._explain("all_reduce", self._op, error) from error
        self._requests.append((request, stage))

        def start(tensor: Tensor, deadline: float) -> MPI.Request:
            self._op += 1
            if self._error is not None:
                raise self._error.again()
            request.Start()
            return request

        self._prepared[form] = self._all_reduce_call(start, stage)
        return self._prepared[form]

    def _all_reduce_call(self, start: Callable[[Tensor, float], MPI.Request], stage: bytearray | None = None) -> OpCall:
        """The all_reduces that `start` begins, on the stage if there is one."""

        def finish_late(
            request: MPI.Request | None, error: RuntimeError | None, tensor: Tensor, deadline: float
        ) -> None:
            self._finish_late("all_reduce", tensor if stage is None else stage, request, error, deadline)

        return self._op_call(start, finish_late, stage)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        kind = _native_op(tensor.dtype, op)
        if kind is None:
            super().reduce(tensor, dst, op, deadline)
            return
        mpi, reduce = kind
        contribution = arithmetic.prescale(tensor, op)
        memory = [buffer_of(contribution), contribution.numel(), mpi]
        if self.rank != dst:
            self._run("reduce", self._comm.Ireduce, (memory, None, reduce, dst), deadline, contribution)
            return
        if contribution is not tensor:
            tensor.copy_(contribution)
            memory[0] = buffer_of(tensor)
        self._run("reduce", self._comm.Ireduce, (MPI.IN_PLACE, memory, reduce, dst), deadline, tensor)
        arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        kind = _native_op(output.dtype, op)
        if kind is None or sum(tensor.nbytes for tensor in inputs) >= SCATTERED_BYTES:
            super().reduce_scatter(output, inputs, op, deadline)
            return
        mpi, reduce = kind
        contributions = [arithmetic.prescale(tensor, op) for tensor in inputs]
        memory, kept = gathered_buffer(contributions)
        sizes = [tensor.numel() for tensor in inputs]
        source, target = [memory, sum(sizes), mpi], [buffer_of(output), output.numel(), mpi]
        kept = kept, contributions, output
        self._run("reduce_scatter", self._comm.Ireduce_scatter, (source, target, sizes, reduce), deadline, kept)
        arithmetic.postscale(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        self._run("broadcast", self._comm.Ibcast, ([buffer_of(tensor), MPI.BYTE], src), deadline, tensor)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if sum(output.nbytes for output in outputs) >= GATHERED_BYTES:
            super().all_gather(outputs, tensor, deadline)
            return
        memory, staged = receive_buffer(outputs)
        sizes = [output.nbytes for output in outputs]
        source = [buffer_of(tensor), MPI.BYTE]
        kept = outputs, staged, tensor
        if len(set(sizes)) == 1:
            target = [memory, sizes[0], MPI.BYTE]
            self._run("all_gather", self._comm.Iallgather, (source, target), deadline, kept)
        else:
            uneven = [memory, counts(sizes), MPI.BYTE]
            self._run("all_gather", self._comm.Iallgatherv, (source, uneven), deadline, kept)
        copy_out(staged, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, deadline: float) -> None:
        if output.nbytes >= GATHERED_BYTES:
            super().all_gather_single(output, tensor, deadline)
            return
        given = [buffer_of(tensor), MPI.BYTE], [buffer_of(output), tensor.nbytes, MPI.BYTE]
        self._run("all_gather", self._comm.Iallgather, given, deadline, (output, tensor))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        memory, kept = gathered_buffer(inputs)
        into, staged = receive_buffer(outputs)
        source = [memory, counts([tensor.nbytes for tensor in inputs]), MPI.BYTE]
        target = [into, counts([tensor.nbytes for tensor in outputs]), MPI.BYTE]
        self._run("all_to_all", self._comm.Ialltoallv, (source, target), deadline, (kept, staged, outputs))
        copy_out(staged, outputs)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, deadline: float) -> None:
        source = [buffer_of(tensor), MPI.BYTE]
        if outputs is None:
            self._run("gather", self._comm.Igatherv, (source, None, dst), deadline, tensor)
            return
        memory, staged = receive_buffer(outputs)
        target = [memory, counts([output.nbytes for output in outputs]), MPI.BYTE]
        self._run("gather", self._comm.Igatherv, (source, target, dst), deadline, (tensor, staged, outputs))
        copy_out(staged, outputs)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, deadline: float) -> None:
        target = [buffer_of(tensor), MPI.BYTE]
        if inputs is None:
            self._run("scatter", self._comm.Iscatterv, (None, target, src), deadline, tensor)
            return
        memory, kept = gathered_buffer(inputs)
        source = [memory, counts([part.nbytes for part in inputs]), MPI.BYTE]
        self._run("scatter", self._comm.Iscatterv, (source, target, src), deadline, (tensor, kept, inputs))

    def barrier(self, deadline: float) -> None:
        self._run("barrier", self._comm.Ibarrier, (), deadline)

    # -- prepared functions for usual ops

    def function(self, plan: OpPlan) -> Callable[..., None]:
        reduction, dtype = plan.reduction, plan.dtype
        if plan.op != "all_reduce" or plan.nbytes >= self._segmented_bytes or reduction is None or dtype is None:
            return Transport.function(self, plan)
        kind = _native_op(dtype, reduction)
        if kind is None or reduction.name in arithmetic.SCALED:
            return super().function(plan)
        if (prepared := self._prepare(dtype, reduction, plan.nbytes)) is not None:
            return prepared
        mpi, reduce = kind

        def start(tensor: Tensor, deadline: float) -> MPI.Request:
            given = MPI.IN_PLACE, [buffer_of(tensor), mpi], reduce
            return self._begin("all_reduce", tensor, self._comm.Iallreduce, given, deadline)

        return self._all_reduce_call(start)

    # -- the end

    def close(self) -> None:
        self._prepared.clear()
        for request, stage in self._requests:
            abandon(request, stage)
        super().close()


def _native_op(dtype: torch.dtype, op: ReduceOp) -> Native | None:
    """MPI's datatype and operation; None where MPI has none, or its results differ from torch's."""
    return _NATIVE.get((dtype, op.name))
