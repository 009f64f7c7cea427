"""`CheckedOps`: from an op's arguments to what the executor runs.

Each op checks its arguments, describes itself, and says how the transport is called. Their meaning is at
the methods of `Communicator` with the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from holdfast.comms.arithmetic import postscale, prescale
from holdfast.comms.errors import Unsupported
from holdfast.comms.execution.argument_checks import ArgumentChecks
from holdfast.comms.execution.executor import Body, Prepare
from holdfast.comms.ops import Recv, ReduceOp, Send
from holdfast.comms.plan import OpDescription
from holdfast.comms.reproducible import check_exact, reduce_exactly
from holdfast.comms.tensors.memory import is_sparse
from holdfast.comms.tensors.overlap import check_outputs, unaliased
from holdfast.comms.tensors.packing import packed, parts, rows, unpack, unpack_all
from holdfast.comms.transport.base import Transport

Tensor = torch.Tensor

_SPARSE_REDUCTIONS = frozenset(["sum", "avg", "premul_sum"])
"""The others would have to know the zeros that are not stored."""


class CheckedOp(NamedTuple):
    """An op whose arguments were checked: what it is, and what makes the body that the executor runs."""

    description: OpDescription
    prepare: Prepare


class CheckedOps:
    """The ops of one communicator over its transport."""

    def __init__(self, transport: Transport, check: ArgumentChecks) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._check = check

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, reproducible: bool) -> CheckedOp:
        if is_sparse(tensor):
            return self._all_reduce_sparse(tensor, op, reproducible)
        tensor = self._check.output(tensor)
        self._check.reducible(tensor, op)
        if reproducible:
            check_exact(op)
        transport = self._transport

        def prepare() -> Body:
            flat, inner = self._check.carrier(packed(tensor), op), self._check.carrier_op(op, tensor.dtype)

            def body(deadline: float) -> None:
                if reproducible:
                    reduce_exactly(transport, flat, inner, deadline)
                else:
                    transport.all_reduce(flat, inner, deadline)
                unpack(flat, tensor)

            return body

        description = OpDescription(
            "all_reduce",
            tensor.nbytes,
            tensors=tensor,
            detail="reproducible " + op.name if reproducible else op.name,
            inputs=(tensor,),
            outputs=(tensor,),
            reduction=op,
        )
        return CheckedOp(description, prepare)

    def _all_reduce_sparse(self, tensor: Tensor, op: ReduceOp, reproducible: bool) -> CheckedOp:
        stored = tensor.detach().coalesce()
        values = self._check.operand(stored.values())
        self._check.reducible(values, op)
        if op.name not in _SPARSE_REDUCTIONS or reproducible:
            what = "reproducible " * reproducible + f"all_reduce ({op.name})"
            raise Unsupported(f"{what} of sparse tensors", "sum or average them, or pass dense ones: to_dense()")

        def prepare() -> Body:
            entries = tensor.detach().coalesce()
            carrier = self._check.carrier(packed(entries.values()), op)
            entries = torch.sparse_coo_tensor(
                entries.indices(), carrier, tensor.shape, device=carrier.device, is_coalesced=True
            )
            inner = self._check.carrier_op(op, tensor.dtype)

            def body(deadline: float) -> None:
                total = _sum_sparse(self._transport, entries, inner, deadline)
                with torch.no_grad():  # not of `tensor.detach()`, which would get the entries alone
                    tensor.copy_(total.to(tensor.dtype))

            return body

        description = OpDescription(
            "all_reduce",
            values.nbytes,
            detail=(f"sparse {op.name}", tensor.dtype, str(tuple(tensor.shape))),
            inputs=(tensor,),
            outputs=(tensor,),
            reduction=op,
        )
        return CheckedOp(description, prepare)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp) -> CheckedOp:
        dst = self._check.rank(dst, "dst")
        tensor = self._check.output(tensor) if dst == self.rank else self._check.operand(tensor)
        self._check.reducible(tensor, op)

        def prepare() -> Body:
            flat = self._check.carrier(packed(tensor), op)

            def body(deadline: float) -> None:
                self._transport.reduce(flat, dst, self._check.carrier_op(op, tensor.dtype), deadline)
                if dst == self.rank:
                    unpack(flat, tensor)

            return body

        words = op.name, f"to {dst}"
        description = OpDescription(
            "reduce",
            tensor.nbytes,
            tensors=tensor,
            detail=words,
            peer=dst,
            inputs=(tensor,),
            outputs=(tensor,) if dst == self.rank else (),
            reduction=op,
        )
        return CheckedOp(description, prepare)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp) -> CheckedOp:
        output, inputs = self._check.output(output, "output"), self._check.operands(inputs, "inputs")
        self._check.reducible(output, op)
        self._check.one_for_each(inputs, "inputs", output.dtype)
        self._check.same_count(output, inputs[self.rank].numel(), "output", f"as many as inputs[{self.rank}]")

        def prepare() -> Body:
            flat = self._check.carrier(packed(output), op)
            given = [self._check.carrier(packed(each), op) for each in inputs]
            given = [unaliased(each, [flat], 0 if i == self.rank else None) for i, each in enumerate(given)]

            def body(deadline: float) -> None:
                self._transport.reduce_scatter(flat, given, self._check.carrier_op(op, output.dtype), deadline)
                unpack(flat, output)

            return body

        description = OpDescription(
            "reduce_scatter",
            output.nbytes,
            tensors=tuple(inputs),
            detail=op.name,
            inputs=tuple(inputs),
            outputs=(output,),
            reduction=op,
        )
        return CheckedOp(description, prepare)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> CheckedOp:
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.reducible(output, op)
        self._check.same_dtype(tensor, output)
        self._check.whole(tensor, output, "tensor", "output's")

        def prepare() -> Body:
            flat, given = self._check.carrier(packed(output), op), self._check.carrier(packed(tensor), op)
            if unaliased(flat, parts(given, self.size), self.rank) is not flat:
                given = given.clone()

            def body(deadline: float) -> None:
                self._transport.reduce_scatter_single(flat, given, self._check.carrier_op(op, output.dtype), deadline)
                unpack(flat, output)

            return body

        description = OpDescription(
            "reduce_scatter_single",
            output.nbytes,
            tensors=output,
            detail=op.name,
            inputs=(tensor,),
            outputs=(output,),
            reduction=op,
        )
        return CheckedOp(description, prepare)

    # -- moves

    def broadcast(self, tensor: Tensor, src: int) -> CheckedOp:
        src = self._check.rank(src, "src")
        tensor = self._check.operand(tensor) if src == self.rank else self._check.output(tensor)
        self._check.movable(tensor)
        words = f"from {src}"

        def prepare() -> Body:
            flat = packed(tensor)

            def body(deadline: float) -> None:
                self._transport.broadcast(flat, src, deadline)
                if src != self.rank:
                    unpack(flat, tensor)

            return body

        description = OpDescription(
            "broadcast",
            tensor.nbytes,
            tensors=tensor,
            detail=words,
            peer=src,
            inputs=(tensor,) if src == self.rank else (),
            outputs=(tensor,),
        )
        return CheckedOp(description, prepare)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CheckedOp:
        outputs, tensor = self._check.outputs(outputs, "outputs"), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.one_for_each(outputs, "outputs", tensor.dtype)
        self._check.same_count(outputs[self.rank], tensor.numel(), f"outputs[{self.rank}]", "as many as tensor")

        def prepare() -> Body:
            flats = [packed(t) for t in outputs]
            given = unaliased(packed(tensor), flats, self.rank)

            def body(deadline: float) -> None:
                self._transport.all_gather(flats, given, deadline)
                unpack_all(flats, outputs)

            return body

        description = OpDescription(
            "all_gather", tensor.nbytes, tensors=tuple(outputs), inputs=(tensor,), outputs=tuple(outputs)
        )
        return CheckedOp(description, prepare)

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> CheckedOp:
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.same_dtype(output, tensor)
        self._check.whole(output, tensor, "output", "tensor's")

        def prepare() -> Body:
            flat = packed(output)
            given = unaliased(packed(tensor), parts(flat, self.size), self.rank)

            def body(deadline: float) -> None:
                self._transport.all_gather_single(flat, given, deadline)
                unpack(flat, output)

            return body

        description = OpDescription(
            "all_gather_single", tensor.nbytes, tensors=tensor, inputs=(tensor,), outputs=(output,)
        )
        return CheckedOp(description, prepare)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> CheckedOp:
        if len(inputs) != self.size:
            raise ValueError(f"inputs has {len(inputs)} tensors; it needs one for each of {self.size} ranks")
        inputs, outputs = self._check.operands(inputs, "inputs"), self._check.outputs(outputs, "outputs")
        self._check.movable(inputs[0])
        dtype = inputs[0].dtype
        self._check.one_for_each(inputs, "inputs", dtype)
        self._check.one_for_each(outputs, "outputs", dtype)
        own = inputs[self.rank].numel()
        self._check.same_count(outputs[self.rank], own, f"outputs[{self.rank}]", f"as many as inputs[{self.rank}]")

        def prepare() -> Body:
            flats, given = [packed(t) for t in outputs], [packed(t) for t in inputs]
            given = [unaliased(each, flats, i if i == self.rank else None) for i, each in enumerate(given)]

            def body(deadline: float) -> None:
                self._transport.all_to_all(flats, given, deadline)
                unpack_all(flats, outputs)

            return body

        description = OpDescription(
            "all_to_all", sum(t.nbytes for t in inputs), detail=dtype, inputs=tuple(inputs), outputs=tuple(outputs)
        )
        return CheckedOp(description, prepare)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
    ) -> CheckedOp:
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.same_dtype(output, tensor)
        splits = None
        even = output_split_sizes is None and input_split_sizes is None
        if even and output.numel() == tensor.numel():
            self._check.evenly_divided(output, "output")
            self._check.evenly_divided(tensor, "tensor")
        else:
            to_output = self._check.split_rows(output, output_split_sizes, "output")
            of_tensor = self._check.split_rows(tensor, input_split_sizes, "tensor")
            self._check.own_part(output, to_output, tensor, of_tensor)
            splits = to_output, of_tensor

        def prepare() -> Body:
            flat = packed(output)
            given = unaliased(packed(tensor), [flat])

            def body(deadline: float) -> None:
                if splits is None:
                    self._transport.all_to_all_single(flat, given, deadline)
                else:
                    into, out_of = rows(flat, output, splits[0]), rows(given, tensor, splits[1])
                    self._transport.all_to_all(into, out_of, deadline)
                unpack(flat, output)

            return body

        description = OpDescription(
            "all_to_all_single", tensor.nbytes, detail=tensor.dtype, inputs=(tensor,), outputs=(output,)
        )
        return CheckedOp(description, prepare)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int) -> CheckedOp:
        tensor = self._check.operand(tensor)
        outputs = self._check.outputs(outputs, "outputs") if outputs else outputs
        self._check.movable(tensor)
        dst = self._check.rank(dst, "dst")
        self._check.of_root(outputs, "outputs", dst, tensor)

        def prepare() -> Body:
            flats = [packed(t) for t in outputs or ()]
            given = unaliased(packed(tensor), flats, dst)

            def body(deadline: float) -> None:
                self._transport.gather(given, flats if self.rank == dst else None, dst, deadline)
                unpack_all(flats, outputs or ())

            return body

        description = OpDescription(
            "gather",
            tensor.nbytes,
            detail=(tensor.dtype, f"to {dst}"),
            peer=dst,
            inputs=(tensor,),
            outputs=tuple(outputs or ()),
        )
        return CheckedOp(description, prepare)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int) -> CheckedOp:
        tensor = self._check.output(tensor)
        inputs = self._check.operands(inputs, "inputs") if inputs else inputs
        self._check.movable(tensor)
        src = self._check.rank(src, "src")
        self._check.of_root(inputs, "inputs", src, tensor)

        def prepare() -> Body:
            flat = packed(tensor)
            given = [unaliased(packed(each), [flat], 0 if i == src else None) for i, each in enumerate(inputs or ())]

            def body(deadline: float) -> None:
                self._transport.scatter(flat, given if self.rank == src else None, src, deadline)
                unpack(flat, tensor)

            return body

        description = OpDescription(
            "scatter",
            tensor.nbytes,
            detail=(tensor.dtype, f"from {src}"),
            peer=src,
            inputs=tuple(inputs or ()),
            outputs=(tensor,),
        )
        return CheckedOp(description, prepare)

    def barrier(self) -> CheckedOp:
        return CheckedOp(OpDescription("barrier", 0), lambda: self._transport.barrier)

    # -- point to point

    def send(self, tensor: Tensor, dst: int, tag: int) -> CheckedOp:
        tensor = self._check.operand(tensor)
        dst, tag = self._check.message(tensor, dst, "dst", tag)

        def prepare() -> Body:
            flat = packed(tensor)
            return lambda deadline: self._transport.send(flat, dst, tag, deadline)

        return CheckedOp(OpDescription("send", tensor.nbytes, False, tensor, tag, dst, inputs=(tensor,)), prepare)

    def recv(self, tensor: Tensor, src: int, tag: int) -> CheckedOp:
        tensor = self._check.output(tensor)
        src, tag = self._check.message(tensor, src, "src", tag)

        def prepare() -> Body:
            flat = packed(tensor)

            def body(deadline: float) -> None:
                self._transport.recv(flat, src, tag, deadline)
                unpack(flat, tensor)

            return body

        return CheckedOp(OpDescription("recv", tensor.nbytes, False, tensor, tag, src, outputs=(tensor,)), prepare)

    def batch_send_recv(self, batch: Sequence[Send | Recv]) -> CheckedOp:
        if not all(isinstance(item, Send | Recv) for item in batch):
            raise TypeError("batch_send_recv takes holdfast.comms.Send and Recv objects")
        items = [replace(item, tensor=self._check.operand(item.tensor, f"batch[{i}]")) for i, item in enumerate(batch)]
        sends = [item for item in items if isinstance(item, Send)]
        recvs = [item for item in items if isinstance(item, Recv)]
        to = [self._check.message(send.tensor, send.dst, "dst", send.tag) for send in sends]
        of = [self._check.message(recv.tensor, recv.src, "src", recv.tag) for recv in recvs]
        received = {f"batch[{i}]": item.tensor for i, item in enumerate(items) if isinstance(item, Recv)}
        check_outputs(list(received.values()), list(received))

        def prepare() -> Body:
            flats = [packed(recv.tensor) for recv in recvs]
            given = [(unaliased(packed(send.tensor), flats), *line) for send, line in zip(sends, to, strict=True)]
            into = [(flat, *line) for flat, line in zip(flats, of, strict=True)]

            def body(deadline: float) -> None:
                self._transport.batch_send_recv(given, into, deadline)
                unpack_all(flats, [recv.tensor for recv in recvs])

            return body

        description = OpDescription(
            "batch_send_recv",
            sum(send.tensor.nbytes for send in sends),
            False,
            inputs=tuple(send.tensor for send in sends),
            outputs=tuple(recv.tensor for recv in recvs),
        )
        return CheckedOp(description, prepare)


def _sum_sparse(transport: Transport, entries: Tensor, op: ReduceOp, deadline: float) -> Tensor:
    """The sum, average or scaled sum of every rank's `entries`, a coalesced COO tensor; equal bits on every rank."""
    indices, values = entries.indices().contiguous(), prescale(entries.values(), op).contiguous()
    counts = torch.empty(transport.size, dtype=torch.int64, device=values.device)
    transport.all_gather_single(counts, torch.full_like(counts[:1], indices.shape[1]), deadline)
    lengths = counts.tolist()
    all_indices = [indices.new_empty((indices.shape[0], length)) for length in lengths]
    all_values = [values.new_empty((length, *values.shape[1:])) for length in lengths]
    transport.all_gather(all_indices, indices, deadline)
    transport.all_gather(all_values, values, deadline)
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), entries.shape, device=entries.device, check_invariants=False
    ).coalesce()
    postscale(total.values(), op, transport.size)
    return total
