"""The ops of a communicator: each checks its arguments and hands a body to the executor.

Transports move the bytes; `communicator` has splits, windows and the end of a communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.comms.algorithms.sparse_reduction import SPARSE_REDUCTIONS, all_reduce_sparse
from holdfast.comms.errors import Unsupported
from holdfast.comms.execution.argument_checks import ArgumentChecks
from holdfast.comms.execution.executor import Body, Executor
from holdfast.comms.execution.prepared import PreparedOp, prepare
from holdfast.comms.ops import Recv, ReduceOp, Send
from holdfast.comms.plan import OpDescription
from holdfast.comms.plugins.hints import Hints
from holdfast.comms.reproducible import check_exact, reduce_exactly
from holdfast.comms.tensors.memory import is_sparse
from holdfast.comms.tensors.overlap import check_outputs, unaliased
from holdfast.comms.tensors.packing import packed, parts, rows, unpack, unpack_all
from holdfast.comms.transport.base import Transport
from holdfast.comms.work import DONE, Work

Tensor = torch.Tensor


class CollectiveCalls:
    """The ops of `Communicator`, its only subclass. A base class, since delegation would repeat 14 signatures."""

    def __init__(self, transport: Transport, check: ArgumentChecks, executor: Executor) -> None:
        self.rank: int = transport.rank
        self.size: int = transport.size
        self._transport = transport
        self._check = check
        self._executor = executor
        self._fast = executor.fast_path(check)

    # -- reductions

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        reproducible: bool = False,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks, in place; every rank gets equal bits.

        With `reproducible` the bits depend neither on the number of ranks, their order, the algorithm nor the
        backend, only on the values (see `holdfast.comms.reproducible`).

        Sparse COO tensors are summed, averaged or summed scaled: the stored entries may differ from rank to rank.
        """
        fast = self._fast
        if (
            fast
            and not async_op
            and timeout is None
            and hints is None
            and not reproducible
            and fast.all_reduce(tensor, op)
        ):
            return DONE
        if is_sparse(tensor):
            return self._all_reduce_sparse(tensor, op, async_op, timeout, reproducible, self._check.hints(hints))
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

        return self._executor.issue(
            OpDescription(
                "all_reduce",
                tensor.nbytes,
                lambda: _alike(tensor, op.name, "reproducible" * reproducible),
                tensor,
                "reproducible " + op.name if reproducible else op.name,
                inputs=(tensor,),
                outputs=(tensor,),
                reduction=op,
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def _all_reduce_sparse(
        self,
        tensor: Tensor,
        op: ReduceOp,
        async_op: bool,
        timeout: float | None,
        reproducible: bool,
        hints: Hints | None,
    ) -> Work:
        stored = tensor.detach().coalesce()
        values = self._check.operand(stored.values())
        self._check.reducible(values, op)
        if op.name not in SPARSE_REDUCTIONS or reproducible:
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
                total = all_reduce_sparse(self._transport, entries, inner, deadline)
                with torch.no_grad():  # not of `tensor.detach()`, which would get the entries alone
                    tensor.copy_(total.to(tensor.dtype))

            return body

        return self._executor.issue(
            OpDescription(
                "all_reduce",
                values.nbytes,
                lambda: _alike(tensor, op.name, "sparse"),
                None,
                f"sparse {op.name}",
                inputs=(tensor,),
                outputs=(tensor,),
                reduction=op,
            ),
            prepare,
            async_op,
            timeout,
            hints,
        )

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` over all ranks into that of rank `dst`; on other ranks it is unchanged."""
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
        return self._executor.issue(
            OpDescription(
                "reduce",
                tensor.nbytes,
                lambda: _alike(tensor, *words),
                tensor,
                words,
                dst,
                inputs=(tensor,),
                outputs=(tensor,) if dst == self.rank else (),
                reduction=op,
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce every rank's `inputs[i]` into rank i's `output`; shapes may differ from rank to rank."""
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

        return self._executor.issue(
            OpDescription(
                "reduce_scatter",
                output.nbytes,
                lambda: _alike_list(inputs, op.name),
                tuple(inputs),
                op.name,
                inputs=tuple(inputs),
                outputs=(output,),
                reduction=op,
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def reduce_scatter_single(
        self,
        output: Tensor,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Reduce `tensor` and put its part i into rank i's `output`, which has 1/size of its elements."""
        fast = self._fast
        if fast and not async_op and timeout is None and hints is None and fast.reduce_scatter(output, tensor, op):
            return DONE
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

        return self._executor.issue(
            OpDescription(
                "reduce_scatter_single",
                output.nbytes,
                lambda: _alike(output, op.name),
                output,
                op.name,
                inputs=(tensor,),
                outputs=(output,),
                reduction=op,
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    # -- moves

    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, timeout: float | None = None, hints: Hints | None = None
    ) -> Work:
        """Copy rank `src`'s `tensor` into every rank's."""
        fast = self._fast
        if fast and not async_op and timeout is None and hints is None and fast.broadcast(tensor, src):
            return DONE
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

        return self._executor.issue(
            OpDescription(
                "broadcast",
                tensor.nbytes,
                lambda: _alike(tensor, words),
                tensor,
                words,
                src,
                inputs=(tensor,) if src == self.rank else (),
                outputs=(tensor,),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `tensor` into every rank's `outputs[i]`; shapes may differ from rank to rank."""
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

        return self._executor.issue(
            OpDescription(
                "all_gather",
                tensor.nbytes,
                lambda: _alike_list(outputs),
                tuple(outputs),
                inputs=(tensor,),
                outputs=tuple(outputs),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def all_gather_single(
        self,
        output: Tensor,
        tensor: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Concatenate every rank's `tensor`, in rank order, into `output`, which has size times its elements."""
        fast = self._fast
        if fast and not async_op and timeout is None and hints is None and fast.all_gather(output, tensor):
            return DONE
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

        return self._executor.issue(
            OpDescription(
                "all_gather_single",
                tensor.nbytes,
                lambda: _alike(tensor),
                tensor,
                inputs=(tensor,),
                outputs=(output,),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `inputs[j]` into rank j's `outputs[i]`; shapes may differ from pair to pair."""
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

        return self._executor.issue(
            OpDescription(
                "all_to_all",
                sum(t.nbytes for t in inputs),
                lambda: str(dtype),
                None,
                dtype,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Send a part of `tensor` to each rank, and concatenate the received parts in `output`, along dimension 0.

        Split sizes are numbers of rows, one for each rank; without them the rows are divided evenly.
        """
        fast, even = self._fast, output_split_sizes is None and input_split_sizes is None
        if fast and even and not async_op and timeout is None and hints is None and fast.all_to_all(output, tensor):
            return DONE
        output, tensor = self._check.output(output, "output"), self._check.operand(tensor)
        self._check.movable(tensor)
        self._check.same_dtype(output, tensor)
        splits = None
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

        return self._executor.issue(
            OpDescription(
                "all_to_all_single",
                tensor.nbytes,
                lambda: str(tensor.dtype),
                None,
                tensor.dtype,
                inputs=(tensor,),
                outputs=(output,),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None = None,
        dst: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy rank i's `tensor` into `outputs[i]` on rank `dst`; `outputs` is None on the other ranks."""
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

        return self._executor.issue(
            OpDescription(
                "gather",
                tensor.nbytes,
                lambda: f"to {dst}, {tensor.dtype}",
                None,
                tensor.dtype,
                dst,
                inputs=(tensor,),
                outputs=tuple(outputs or ()),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def scatter(
        self,
        tensor: Tensor,
        inputs: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Copy `inputs[i]` of rank `src` into rank i's `tensor`; `inputs` is None on the other ranks."""
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

        return self._executor.issue(
            OpDescription(
                "scatter",
                tensor.nbytes,
                lambda: f"from {src}, {tensor.dtype}",
                None,
                tensor.dtype,
                src,
                inputs=tuple(inputs or ()),
                outputs=(tensor,),
            ),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def barrier(self, async_op: bool = False, timeout: float | None = None, hints: Hints | None = None) -> Work:
        """Return once every rank has entered."""
        fast = self._fast
        if fast and not async_op and timeout is None and hints is None and fast.barrier():
            return DONE
        return self._executor.issue(
            OpDescription("barrier", 0, lambda: ""),
            lambda: self._transport.barrier,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    # -- point to point

    def send(
        self,
        tensor: Tensor,
        dst: int,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Send `tensor` to rank `dst`. Once the work is done, the caller may change `tensor`."""
        tensor = self._check.operand(tensor)
        dst, tag = self._check.message(tensor, dst, "dst", tag)

        def prepare() -> Body:
            flat = packed(tensor)
            return lambda deadline: self._transport.send(flat, dst, tag, deadline)

        return self._executor.issue(
            OpDescription("send", tensor.nbytes, None, tensor, tag, dst, inputs=(tensor,)),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def recv(
        self,
        tensor: Tensor,
        src: int,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Receive into `tensor` what rank `src` sent under `tag`."""
        tensor = self._check.output(tensor)
        src, tag = self._check.message(tensor, src, "src", tag)

        def prepare() -> Body:
            flat = packed(tensor)

            def body(deadline: float) -> None:
                self._transport.recv(flat, src, tag, deadline)
                unpack(flat, tensor)

            return body

        return self._executor.issue(
            OpDescription("recv", tensor.nbytes, None, tensor, tag, src, outputs=(tensor,)),
            prepare,
            async_op,
            timeout,
            self._check.hints(hints),
        )

    def batch_send_recv(
        self,
        batch: Sequence[Send | Recv],
        async_op: bool = False,
        timeout: float | None = None,
        hints: Hints | None = None,
    ) -> Work:
        """Run all sends and receives of `batch` at once, without deadlock in any order."""
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
            None,
            inputs=tuple(send.tensor for send in sends),
            outputs=tuple(recv.tensor for recv in recvs),
        )
        return self._executor.issue(description, prepare, async_op, timeout, self._check.hints(hints))

    # -- ops that are started many times

    def prepare(self, name: str, /, *args: Any, **named: Any) -> PreparedOp:
        """Check the arguments of an op once, and return a handle whose `start()` runs it; `handle()` is the same.

            total = comm.prepare("all_reduce", tensor, op=ReduceOp.MAX)
            for _ in range(1000):
                total()

        `start(async_op=False, timeout=None)` returns the op's `Work`, and costs less than the plain call. The op runs
        on the tensors as they are then: a changed one is checked again. A handle refers to its communicator, and raises
        its `Revoked` once that is over. Raises ValueError for an unknown `name`, and the errors of the op's arguments.
        """
        return prepare(self, name, args, named)


def _alike(tensor: Tensor, *details: str) -> str:
    """The text of details, dtype and shape that must be equal on all ranks. The shape, which may be long, is last."""
    return ", ".join([*filter(None, details), str(tensor.dtype), str(tuple(tensor.shape))])


def _alike_list(tensors: Sequence[Tensor], *details: str) -> str:
    return ", ".join([*details, str(tensors[0].dtype), f"{[tensor.numel() for tensor in tensors]} elements"])
