"""From an op's arguments to what the executor runs: `ArgumentChecks`, `CheckedOps`, and `prepare` for repeated ops.

Each op checks its arguments before any byte moves, describes itself, and says how the transport is called. What the
arguments mean stands at the methods of `Communicator` with the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.comms._native import PreparedOp
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS, SCALED, accumulation_dtype, check_reducible, postscale, prescale
from holdfast.comms.errors import Unsupported
from holdfast.comms.executor import Body, Prepare
from holdfast.comms.ops import OPS, TAGS, OpDescription, OpPlan, Recv, ReduceOp, Send
from holdfast.comms.plugins.hints import Hints, parse_hints
from holdfast.comms.plugins.spec import BackendInfo
from holdfast.comms.quantities import integer
from holdfast.comms.reproducible import check_exact, reduce_exactly
from holdfast.comms.tensors.overlap import check_outputs, extent, overlapping
from holdfast.comms.tensors.packing import (
    dlpack_device,
    held_bytes,
    is_sparse,
    names,
    packed,
    parts,
    plain,
    plain_tensor,
    rows,
    unpack,
    unpack_all,
)
from holdfast.comms.transport.base import Transport
from holdfast.comms.work import DONE, Work

if TYPE_CHECKING:
    from holdfast.comms.communicator import Communicator

Tensor = torch.Tensor


class ArgumentChecks:
    """Checks arguments against one communicator's rank, size, device and backend capabilities."""

    def __init__(self, rank: int, size: int, device: torch.device, info: BackendInfo) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._on_cpu = device.type == "cpu"
        self._place = () if self._on_cpu else dlpack_device(device)
        self._backend, self._hints = info.name, info.hints
        self._reduces = info.capabilities.reduces.get(device.type, frozenset())
        self._widens = info.capabilities.widens(device.type)
        self._carried = frozenset(EIGHT_BIT_FLOATS if self._widens else ())
        self._moves = info.capabilities.moves.get(device.type, frozenset())
        self._movable: set[torch.dtype] = set()
        self._carriers: dict[tuple[torch.dtype, str], torch.dtype] = {}

    def hints(self, given: Hints | None) -> Hints | None:
        """Hints of one op, checked. Raises ValueError for those that the backend does not announce for ops."""
        return parse_hints(self._backend, self._hints, given, per_op=True) if given else None

    def operand(self, tensor: Any, what: str = "tensor") -> Tensor:
        """`tensor`, or its memory as a plain tensor.

        Raises TypeError, ValueError or `Unsupported`, naming it as `what`, unless it is a dense tensor with memory of
        its own on this communicator's device.
        """
        return plain_tensor(tensor, what, self._device)

    def operands(self, tensors: Sequence[Any], what: str) -> list[Tensor]:
        """`operand` of each tensor."""
        return [self.operand(tensor, f"{what}[{i}]") for i, tensor in enumerate(tensors)]

    def output(self, tensor: Any, what: str = "tensor") -> Tensor:
        """As `operand`. Raises ValueError if elements of the tensor share memory with each other."""
        given = plain_tensor(tensor, what, self._device)
        if not given.is_contiguous():
            check_outputs([given], [what])
        return given

    def outputs(self, tensors: Sequence[Any], what: str) -> list[Tensor]:
        """`output` of each tensor. Raises ValueError if two of them share memory."""
        given = self.operands(tensors, what)
        check_outputs(given, [f"{what}[{i}]" for i in range(len(given))])
        return given

    def needs_no_copy(self, tensor: Tensor) -> bool:
        """Whether `packed(tensor)` would return `tensor` itself."""
        return self._place is not None and plain(tensor, *self._place)

    def movable(self, tensor: Tensor) -> None:
        """Raise `Unsupported` unless the backend moves the tensor's dtype."""
        if tensor.dtype not in self._movable:
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in self._moves:
                raise Unsupported(f"moving {name} over {self._backend!r}", "view it as uint8")
            self._movable.add(tensor.dtype)

    def reducible(self, tensor: Tensor, op: Any) -> torch.dtype:
        """The dtype in which the backend reduces the tensor by `op`: its own, or a wider one.

        Raises TypeError for what is no `ReduceOp`, and `Unsupported` unless there is one.
        """
        if not isinstance(op, ReduceOp):
            raise TypeError(f"op must be a holdfast.comms.ReduceOp, not {op!r}")
        carrier = self._carriers.get((tensor.dtype, op.name))
        if carrier is None:
            name = str(tensor.dtype).removeprefix("torch.")
            if name not in self._reduces and name not in self._widens:
                raise Unsupported(f"reducing {name} over {self._backend!r}", "convert it to a wider dtype first")
            check_reducible(tensor.dtype, op)
            carrier = self._carriers[tensor.dtype, op.name] = self._carrier_of(tensor.dtype, op)
        return carrier

    def _carrier_of(self, dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
        if dtype in self._carried:
            return torch.float32
        wide = accumulation_dtype(dtype, op) if self._on_cpu else None
        return wide if wide is not None and names([wide]) <= self._reduces else dtype

    def carrier(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """The tensor to reduce instead of `tensor`: itself, or a copy in a wider dtype. Call `reducible` before.

        A factor that is a tensor is read and applied here, so that transports know factors as numbers only.
        """
        wide = self._carriers[tensor.dtype, op.name]
        carrier = tensor if wide is tensor.dtype else tensor.to(wide)  # `to` costs a microsecond also for nothing
        if isinstance(op.factor, Tensor):
            return carrier * op.factor.detach().reshape(()).to(carrier.device, carrier.dtype)
        return carrier

    def carrier_op(self, op: ReduceOp, dtype: torch.dtype) -> ReduceOp:
        """The reduction of carriers that gives `op` of `dtype`: for avg, inputs are divided before they are added."""
        if isinstance(op.factor, Tensor):
            return ReduceOp.SUM
        widened = op.name == "avg" and accumulation_dtype(dtype, op) == self._carriers[dtype, op.name] == torch.float32
        return ReduceOp.premul_sum(1 / self._size) if widened else op

    def rank(self, rank: Any, what: str) -> int:
        """`rank` as an int. Raises ValueError unless it is a rank of this communicator."""
        number = integer(rank, what)
        if not 0 <= number < self._size:
            raise ValueError(f"{what}={number} is out of range: ranks are 0 to {self._size - 1}")
        return number

    def message(self, tensor: Tensor, peer: Any, what: str, tag: Any) -> tuple[int, int]:
        """Check a message, and return `peer` and `tag` as ints.

        Raises as `movable`; ValueError unless `peer` is another rank and `tag` is below `TAGS`.
        """
        self.movable(tensor)
        return self.line(peer, what, tag)

    def line(self, peer: Any, what: str, tag: Any) -> tuple[int, int]:
        """`peer` and `tag` of a message as ints. Raises ValueError as `message`."""
        peer, tag = self.rank(peer, what), integer(tag, "tag")
        if peer == self._rank:
            raise ValueError(f"{what}={peer}: a rank cannot send to or receive from itself")
        if not 0 <= tag < TAGS:
            raise ValueError(f"tag={tag} is out of range: tags are whole numbers from 0 to {TAGS - 1}")
        return peer, tag

    def one_for_each(self, items: Sequence[Tensor], what: str, dtype: torch.dtype) -> None:
        """Raise ValueError unless there is one tensor for each rank, all of `dtype`."""
        if len(items) != self._size:
            raise ValueError(f"{what} has {len(items)} tensors; it needs one for each of {self._size} ranks")
        for item in items:
            if item.dtype != dtype:
                raise ValueError(f"{what} holds {item.dtype}, the other tensors {dtype}; pass one dtype")

    def of_root(self, items: Sequence[Tensor] | None, what: str, root: int, tensor: Tensor) -> None:
        """Raise ValueError unless the root passes one tensor for each rank, and the other ranks pass none."""
        if self._rank != root:
            if items:
                raise ValueError(f"{what} belongs to rank {root} alone; pass None on rank {self._rank}")
            return
        if items is None:
            raise ValueError(f"rank {root} must pass {what}, one tensor for each rank")
        self.one_for_each(items, what, tensor.dtype)
        self.same_count(items[root], tensor.numel(), f"{what}[{root}]", "as many as tensor")

    def same_dtype(self, tensor: Tensor, checked: Tensor) -> None:
        """Raise ValueError unless `tensor` has the dtype of `checked`, which was checked before."""
        if tensor.dtype != checked.dtype:
            raise ValueError(f"one tensor is {tensor.dtype}, the other {checked.dtype}; pass one dtype")

    def same_count(self, tensor: Tensor, count: int, what: str, meaning: str) -> None:
        if tensor.numel() != count:
            raise ValueError(f"{what} has {tensor.numel()} elements; it needs {count}: {meaning}")

    def whole(self, tensor: Tensor, part: Tensor, what: str, whose: str) -> None:
        """Raise ValueError unless `tensor` has as many elements as all ranks' `part` together."""
        count = part.numel() * self._size
        if tensor.numel() != count:
            self.same_count(tensor, count, what, f"size times {whose}")

    def evenly_divided(self, tensor: Tensor, what: str) -> None:
        """Raise ValueError unless the rows of dimension 0 divide evenly over the ranks."""
        shape = tensor.shape
        total = shape[0] if shape else 1
        if total % self._size:
            raise ValueError(f"{what} has {total} rows, not a multiple of {self._size}; pass split sizes")

    def split_rows(self, tensor: Tensor, counts: Sequence[int] | None, what: str) -> list[int]:
        """The rows of dimension 0 for each rank: `counts`, or an even division."""
        total = tensor.shape[0] if tensor.dim() else 1
        if counts is None:
            self.evenly_divided(tensor, what)
            return [total // self._size] * self._size
        counts = [integer(count, f"a split size of {what}") for count in counts]
        if len(counts) != self._size or sum(counts) != total or min(counts) < 0:
            raise ValueError(f"{what}: split sizes {counts} do not divide {total} rows over {self._size} ranks")
        return counts

    def own_part(self, output: Tensor, to_output: Sequence[int], tensor: Tensor, of_tensor: Sequence[int]) -> None:
        """Raise ValueError unless the part of `tensor` that this rank sends to itself fills its part of `output`."""
        kept, room = (
            counts[self._rank] * (each.numel() // (sum(counts) or 1))
            for each, counts in ((tensor, of_tensor), (output, to_output))
        )
        if kept != room:
            raise ValueError(
                f"rank {self._rank} keeps {kept} elements of tensor, where output has room for {room}: the split sizes "
                "for itself must agree"
            )


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


def plan_usual(
    transport: Transport,
    check: ArgumentChecks,
    timeout: float,
    op: str,
    tensor: Tensor | None,
    root: int,
    reduction: Any,
    async_op: bool,
) -> OpPlan | Callable[..., Work | None] | None:
    """The plan of an op over a board, else the transport's function for it.

    None if such tensors must be checked or copied on each call, or are reduced in more than one step; and if the
    worker thread has to run an asynchronous op.
    """
    dtype, nbytes = (None, 0) if tensor is None else (tensor.dtype, tensor.nbytes)
    if tensor is not None:
        try:
            if reduction is None:
                check.movable(tensor)
            elif check.reducible(tensor, reduction) != dtype or isinstance(reduction.factor, Tensor):
                return None
        except (TypeError, ValueError, Unsupported):
            return None
        if not check.needs_no_copy(tensor):
            return None
    made = OpPlan.make(op.removesuffix("_single"), dtype, nbytes, root, reduction, timeout)
    if async_op:
        return transport.async_function(made)
    if transport.board is None:
        return transport.function(made)
    in_one_step = reduction is None or (made.kind >= 0 and reduction.name not in SCALED)
    return made if in_one_step else None


SINGLES = ("reduce_scatter_single", "all_gather_single", "all_to_all_single")
PREPARABLE = (*OPS, *SINGLES, "send", "recv", "batch_send_recv")
_FAST = {
    "all_reduce": ("tensor", "op"),
    "reduce_scatter_single": ("output", "tensor", "op"),
    "broadcast": ("tensor", "src"),
    "all_gather_single": ("output", "tensor"),
    "all_to_all_single": ("output", "tensor"),
    "barrier": (),
}
"""The ops of a fast path, and its arguments; all others must have their defaults."""

_OPTIONS = ("async_op", "timeout", "hints")
"""The arguments of a call that are not its op's."""


def prepare(communicator: Communicator, name: str, args: Sequence[Any], named: dict[str, Any]) -> PreparedOp:
    """See `Communicator.prepare`."""
    if name not in PREPARABLE:
        raise ValueError(f"prepare({name!r}): there is no such op; there are {', '.join(PREPARABLE)}")
    if options := {"async_op", "timeout"} & named.keys():
        raise TypeError(f"prepare({name!r}): {' and '.join(sorted(options))} belong to each start of the handle")
    signature = inspect.signature(getattr(communicator, name))
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"prepare({name!r}): {error}") from None
    bound.apply_defaults()
    general = _GeneralStart(communicator, name, bound.arguments)
    usual = name in _FAST and all(
        argument in _FAST[name] or value == signature.parameters[argument].default
        for argument, value in bound.arguments.items()
    )
    path = communicator._fast if usual else None
    arguments = tuple(bound.arguments[argument] for argument in _FAST[name]) if usual else ()
    return PreparedOp(path, name, arguments, general, DONE)


class _GeneralStart:
    """Starts an op through the executor, with the arguments that `prepare` has checked."""

    def __init__(self, communicator: Communicator, name: str, arguments: Mapping[str, Any]) -> None:
        self._communicator, self._name = communicator, name
        self._hints = communicator._check.hints(arguments.get("hints"))
        self._arguments = {key: value for key, value in arguments.items() if key not in _OPTIONS}
        self._tensors = list(_tensors_in(tuple(self._arguments.values())))
        self._renew()

    def _renew(self) -> None:
        self._executor = self._communicator._executor
        self._op: CheckedOp = getattr(self._communicator._ops, self._name)(**self._arguments)
        self._shapes = self._shapes_now()

    def _shapes_now(self) -> list[tuple[torch.Size, torch.dtype, int | None]]:
        return [(each.shape, each.dtype, held_bytes(each)) for each in self._tensors]

    def __call__(self, async_op: bool = False, timeout: float | None = None) -> Work:
        # `reconfigure` gives a communicator other ranks: another executor, transport and checks
        if self._communicator._executor is not self._executor or self._shapes_now() != self._shapes:
            self._renew()
        return self._executor.issue(self._op.description, self._op.prepare, async_op, timeout, self._hints)


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Send | Recv):
            yield value.tensor
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
