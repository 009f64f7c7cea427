"""Checks the arguments of a communicator's ops, before any byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS, accumulation_dtype, check_reducible
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.plugins.hints import Hints, parse_hints
from holdfast.comms.plugins.spec import BackendInfo
from holdfast.comms.quantities import integer
from holdfast.comms.tensors.memory import plain_tensor
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.comms.tensors.packing import dlpack_device, names, plain

Tensor = torch.Tensor

TAGS = 1 << 30
"""User tags are below this. Collectives over messages use the tags above, for which mpi has just enough room."""


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
