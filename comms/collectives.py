"""`CheckedOps`: from an op's arguments to what the executor runs.

Each op checks its arguments, describes itself, and says how the transport is called. Their meaning is at
the methods of `Communicator` with the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from holdfast.comms.tensors.overlap import check_outputs, extent, overlapping
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

    # -- how bodies are made: the transport gets contiguous memory, and for reductions a dtype that it reduces

    def _on_one(
        self,
        description: OpDescription,
        tensor: Tensor,
        run: Callable[..., None],
        *arguments: object,
        fills: bool = True,
    ) -> CheckedOp:
        """An op on one tensor, which it `fills` here, or else only reads: `run(tensor, *arguments, deadline)`."""
        op = description.reduction

        def prepare() -> Body:
            flat = packed(tensor) if op is None else self._check.carrier(packed(tensor), op)

            def body(deadline: float) -> None:
                run(flat, *arguments, deadline)
                if fills:
                    unpack(flat, tensor)

            return body

        return CheckedOp(description, prepare)

    def _between(
        self,
        description: OpDescription,
        run: Callable[[list[Tensor], list[Tensor], float], None],
        own: Callable[[list[Tensor], list[Tensor]], tuple[int, Tensor, Tensor]] | None = None,
    ) -> CheckedOp:
        """An op from its inputs to its outputs: `run(outputs, inputs, deadline)`.

        Inputs that outputs overlap are copied. Only this rank's own part may be in place: `own` tells the number of the
        input that has it, and the two tensors that may be the same memory.
        """
        op, check = description.reduction, self._check

        def prepare() -> Body:
            outputs, inputs = list(map(packed, description.outputs)), list(map(packed, description.inputs))
            if op is not None:
                outputs, inputs = [[check.carrier(each, op) for each in flats] for flats in (outputs, inputs)]
            for number in overlapping(inputs, outputs):
                place, one, other = (-1, inputs[0], outputs[0]) if own is None else own(outputs, inputs)
                if number != place or extent(one) != extent(other):
                    inputs[number] = inputs[number].clone()

            def body(deadline: float) -> None:
                run(outputs, inputs, deadline)
                unpack_all(outputs, description.outputs)

            return body

        return CheckedOp(description, prepare)

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with a part for each."""
        return parts(whole, self.size)[self.rank]

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, reproducible: bool) -> CheckedOp:
        if is_sparse(tensor):
            return self._all_reduce_sparse(tensor, op, reproducible)
        tensor = self._check.output(tensor)
        self._check.reducible(tensor, op)
        if reproducible:
            check_exact(op)
        run = partial(reduce_exactly, self._transport) if reproducible else self._transport.all_reduce
        inner, words = self._check.carrier_op(op, tensor.dtype), "reproducible " + op.name if reproducible else op.name
        both = (tensor,)
        description = OpDescription(
            "all_reduce", tensor.nbytes, True, tensor, words, inputs=both, outputs=both, reduction=op
        )
        return self._on_one(description, tensor, run, inner)

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
        here = dst == self.rank
        tensor = self._check.output(tensor) if here else self._check.operand(tensor)
        self._check.reducible(tensor, op)
        inner, words = self._check.carrier_op(op, tensor.dtype), (op.name, f"to {dst}")
        outputs = (tensor,) if here else ()
        description = OpDescription("reduce", tensor.nbytes, True, tensor, words, dst, (tensor,), outputs, op)
        return self._on_one(description, tensor, self._transport.reduce, dst, inner, fills=here)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp) -> CheckedOp:
        output, inputs = self._check.output(output, "output"), tuple(self._check.operands(inputs, "inputs"))
        self._check.reducible(output, op)
        self._check.one_for_each(inputs, "inputs", output.dtype)
        self._check.same_count(output, inputs[self.rank].numel(), "output", f"as many as inputs[{self.rank}]")
        rank, run, inner = self.rank, self._transport.reduce_scatter, self._check.carrier_op(op, output.dtype)
        return self._between(
            OpDescription("reduce_scatter", output.nbytes, True, inputs, op.name, -1, inputs, (output,), op),
            lambda outputs, inputs, deadline: run(outputs[0], inputs, inner, deadline),
            lambda outputs, inputs: (rank, inputs[rank], outputs[0]),
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: ReduceOp) -> CheckedOp:
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.reducible(output, op)
        self._check.same_dtype(tensor, output)
        self._check.whole(tensor, output, "tensor", "output's")
        run, inner = self._transport.reduce_scatter_single, self._check.carrier_op(op, output.dtype)
        return self._between(
            OpDescription("reduce_scatter_single", output.nbytes, True, output, op.name, -1, (tensor,), (output,), op),
            lambda outputs, inputs, deadline: run(outputs[0], inputs[0], inner, deadline),
            lambda outputs, inputs: (0, self._part(inputs[0]), outputs[0]),
        )

    # -- moves

    def broadcast(self, tensor: Tensor, src: int) -> CheckedOp:
        src = self._check.rank(src, "src")
        here = src == self.rank
        tensor = self._check.operand(tensor) if here else self._check.output(tensor)
        self._check.movable(tensor)
        inputs = (tensor,) if here else ()
        description = OpDescription("broadcast", tensor.nbytes, True, tensor, f"from {src}", src, inputs, (tensor,))
        return self._on_one(description, tensor, self._transport.broadcast, src, fills=not here)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> CheckedOp:
        outputs, tensor = tuple(self._check.outputs(outputs, "outputs")), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.one_for_each(outputs, "outputs", tensor.dtype)
        self._check.same_count(outputs[self.rank], tensor.numel(), f"outputs[{self.rank}]", "as many as tensor")
        rank, run = self.rank, self._transport.all_gather
        return self._between(
            OpDescription("all_gather", tensor.nbytes, tensors=outputs, inputs=(tensor,), outputs=outputs),
            lambda outputs, inputs, deadline: run(outputs, inputs[0], deadline),
            lambda outputs, inputs: (0, inputs[0], outputs[rank]),
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor) -> CheckedOp:
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.same_dtype(output, tensor)
        self._check.whole(output, tensor, "output", "tensor's")
        run = self._transport.all_gather_single
        return self._between(
            OpDescription("all_gather_single", tensor.nbytes, tensors=tensor, inputs=(tensor,), outputs=(output,)),
            lambda outputs, inputs, deadline: run(outputs[0], inputs[0], deadline),
            lambda outputs, inputs: (0, inputs[0], self._part(outputs[0])),
        )

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> CheckedOp:
        if len(inputs) != self.size:
            raise ValueError(f"inputs has {len(inputs)} tensors; it needs one for each of {self.size} ranks")
        inputs, outputs = tuple(self._check.operands(inputs, "inputs")), tuple(self._check.outputs(outputs, "outputs"))
        self._check.movable(inputs[0])
        dtype, rank = inputs[0].dtype, self.rank
        self._check.one_for_each(inputs, "inputs", dtype)
        self._check.one_for_each(outputs, "outputs", dtype)
        self._check.same_count(outputs[rank], inputs[rank].numel(), f"outputs[{rank}]", f"as many as inputs[{rank}]")
        return self._between(
            OpDescription("all_to_all", sum(t.nbytes for t in inputs), detail=dtype, inputs=inputs, outputs=outputs),
            self._transport.all_to_all,
            lambda outputs, inputs: (rank, inputs[rank], outputs[rank]),
        )

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

        def run(outputs: list[Tensor], inputs: list[Tensor], deadline: float) -> None:
            if splits is None:
                self._transport.all_to_all_single(outputs[0], inputs[0], deadline)
            else:
                into, out_of = rows(outputs[0], output, splits[0]), rows(inputs[0], tensor, splits[1])
                self._transport.all_to_all(into, out_of, deadline)

        name, nbytes = "all_to_all_single", tensor.nbytes
        description = OpDescription(name, nbytes, detail=tensor.dtype, inputs=(tensor,), outputs=(output,))
        return self._between(description, run)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int) -> CheckedOp:
        tensor = self._check.operand(tensor)
        outputs = self._check.outputs(outputs, "outputs") if outputs else outputs
        self._check.movable(tensor)
        dst = self._check.rank(dst, "dst")
        self._check.of_root(outputs, "outputs", dst, tensor)
        here, run, words = self.rank == dst, self._transport.gather, (tensor.dtype, f"to {dst}")
        return self._between(
            OpDescription("gather", tensor.nbytes, True, None, words, dst, (tensor,), tuple(outputs or ())),
            lambda outputs, inputs, deadline: run(inputs[0], outputs if here else None, dst, deadline),
            (lambda outputs, inputs: (0, inputs[0], outputs[dst])) if here else None,
        )

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int) -> CheckedOp:
        tensor = self._check.output(tensor)
        inputs = self._check.operands(inputs, "inputs") if inputs else inputs
        self._check.movable(tensor)
        src = self._check.rank(src, "src")
        self._check.of_root(inputs, "inputs", src, tensor)
        here, run, words = self.rank == src, self._transport.scatter, (tensor.dtype, f"from {src}")
        return self._between(
            OpDescription("scatter", tensor.nbytes, True, None, words, src, tuple(inputs or ()), (tensor,)),
            lambda outputs, inputs, deadline: run(outputs[0], inputs if here else None, src, deadline),
            (lambda outputs, inputs: (src, inputs[src], outputs[0])) if here else None,
        )

    def barrier(self) -> CheckedOp:
        return CheckedOp(OpDescription("barrier", 0), lambda: self._transport.barrier)

    # -- point to point

    def send(self, tensor: Tensor, dst: int, tag: int) -> CheckedOp:
        tensor = self._check.operand(tensor)
        dst, tag = self._check.message(tensor, dst, "dst", tag)
        description = OpDescription("send", tensor.nbytes, False, tensor, tag, dst, inputs=(tensor,))
        return self._on_one(description, tensor, self._transport.send, dst, tag, fills=False)

    def recv(self, tensor: Tensor, src: int, tag: int) -> CheckedOp:
        tensor = self._check.output(tensor)
        src, tag = self._check.message(tensor, src, "src", tag)
        description = OpDescription("recv", tensor.nbytes, False, tensor, tag, src, outputs=(tensor,))
        return self._on_one(description, tensor, self._transport.recv, src, tag)

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

        def run(outputs: list[Tensor], inputs: list[Tensor], deadline: float) -> None:
            given = [(flat, *line) for flat, line in zip(inputs, to, strict=True)]
            into = [(flat, *line) for flat, line in zip(outputs, of, strict=True)]
            self._transport.batch_send_recv(given, into, deadline)

        sent = tuple(send.tensor for send in sends)
        nbytes = sum(tensor.nbytes for tensor in sent)
        description = OpDescription("batch_send_recv", nbytes, False, inputs=sent, outputs=tuple(received.values()))
        return self._between(description, run)


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
