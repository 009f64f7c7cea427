"""What an op is: `ReduceOp`, `Send` and `Recv`; its description and its plan; the journal that records it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import msgspec
import torch

from holdfast.comms import _native
from holdfast.comms.tensors.packing import DTYPE_CODE, DTYPES

ReduceName = Literal["sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum"]


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction. `factor` scales each input of `premul_sum` and is 1 otherwise.

    AVG and `premul_sum` of floats below 32 bits are computed in float32, where each input is scaled before it is added;
    AVG of integers below 64 bits is computed in int64. The result is rounded once at the end (integers towards zero),
    and an average never overflows. Wider numbers are added in their own dtype and then divided: they overflow where
    their sum does. On nccl and rccl, AVG of floats is the library's own instead: each input is divided by the number of
    ranks, and added in its dtype.
    """

    name: ReduceName
    factor: float | torch.Tensor = 1.0

    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]

    @staticmethod
    def premul_sum(factor: float | torch.Tensor) -> ReduceOp:
        """The sum of every rank's tensor times that rank's `factor`: a number, or a tensor with one real element.

        A tensor is read when the op runs, on its device: it may be the result of a computation that goes on.
        """
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1 or factor.is_complex():
                raise ValueError(f"a factor must have one real element, not {tuple(factor.shape)} of {factor.dtype}")
            return ReduceOp("premul_sum", factor)
        return ReduceOp("premul_sum", float(factor))


ReduceOp.SUM = ReduceOp("sum")
ReduceOp.PRODUCT = ReduceOp("product")
ReduceOp.MIN = ReduceOp("min")
ReduceOp.MAX = ReduceOp("max")
ReduceOp.AVG = ReduceOp("avg")
ReduceOp.BAND = ReduceOp("band")
ReduceOp.BOR = ReduceOp("bor")
ReduceOp.BXOR = ReduceOp("bxor")


@dataclass(frozen=True, slots=True)
class Send:
    """One send of a batch: `tensor` to rank `dst` under `tag`."""

    tensor: torch.Tensor
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """One receive of a batch: into `tensor` from rank `src` under `tag`."""

    tensor: torch.Tensor
    src: int
    tag: int = 0


OpTensors = torch.Tensor | tuple[torch.Tensor, ...] | None
"""The tensors that must agree on all ranks, in dtype and shape."""


class OpDescription(msgspec.Struct, frozen=True):
    """One op of one rank, described once. `nbytes` is the size of this rank's input.

    All ranks issue a `collective` alike. What must agree between ranks are `tensors`, in dtype and shape, and `detail`
    (a reduction, a root, a tag; several are a tuple). `peer` is the root or the other side, -1 if there is none.
    `inputs` and `outputs` are for hooks: the tensors that this rank reads and writes.
    """

    name: str
    nbytes: int
    collective: bool = True
    tensors: OpTensors = None
    detail: Hashable = None
    peer: int = -1
    inputs: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    reduction: ReduceOp | None = None

    def agreed(self) -> str:
        """The text of what must be equal on all ranks. The shape, which may be long, is last."""
        words = [*self.detail] if isinstance(self.detail, tuple) else [self.detail or ""]
        if isinstance(self.tensors, torch.Tensor):
            words += [self.tensors.dtype, tuple(self.tensors.shape)]
        elif self.tensors:
            words += [self.tensors[0].dtype, f"{[tensor.numel() for tensor in self.tensors]} elements"]
        return ", ".join(filter(None, map(str, words)))


TAGS = 1 << 30
"""User tags are below this. Collectives over messages use the tags above, for which mpi has just enough room."""

OPS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
_COUNTED = ("all_reduce", "reduce", "broadcast")
"""The ops whose tensors have the same number of elements on all ranks."""

_REDUCTIONS = ("", "sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")


_BASE = {"avg": "sum", "premul_sum": "sum"}
_KINDS: dict[tuple[torch.dtype, str], int] = {}


def reduction_kind(dtype: torch.dtype, op: ReduceOp) -> int:
    """The compiled code's number for this reduction (that of the sum, for avg and premul_sum)."""
    known = _KINDS.get((dtype, op.name))
    if known is None:
        name = str(dtype).removeprefix("torch.")
        known = _KINDS[dtype, op.name] = _native.kind(name, _BASE.get(op.name, op.name))
    return known


class OpPlan(msgspec.Struct, frozen=True):
    """A collective without its tensors: made once for each op, dtype, size, root and reduction, and cached.

    `op` is a name of `OPS`; `nbytes` is the size of the input. `count` is the number of elements where it must be the
    same on all ranks, else 0. `timeout` is in seconds. `signature` packs what ranks must agree on into one word, for a
    fast comparison before they access each other's memory; `kind` is the number of the reduction for compiled code, -1
    for a move.
    """

    op: str
    dtype: torch.dtype | None
    nbytes: int
    count: int
    root: int
    reduction: ReduceOp | None
    timeout: float
    signature: int
    kind: int

    @staticmethod
    def make(
        op: str,
        dtype: torch.dtype | None = None,
        nbytes: int = 0,
        root: int = 0,
        reduction: ReduceOp | None = None,
        timeout: float = 0.0,
    ) -> OpPlan:
        """The plan of an op."""
        count = nbytes // dtype.itemsize if op in _COUNTED and dtype is not None else 0
        name = "" if reduction is None else reduction.name
        kind = -1 if reduction is None or dtype is None else reduction_kind(dtype, reduction)
        return OpPlan(op, dtype, nbytes, count, root, reduction, timeout, signature(op, dtype, root, name, count), kind)


def signature(op: str, dtype: torch.dtype | None, root: int, reduction: str, count: int) -> int:
    """Pack an op: op in 4 bits, reduction 4, dtype 7, root 12, number of elements 36."""
    return (
        1 + OPS.index(op)
        | _REDUCTIONS.index(reduction) << 4
        | (DTYPE_CODE[dtype] if dtype is not None else 0) << 8
        | (root & 0xFFF) << 15
        | (count & 0xFFFFFFFFF) << 27
    )


def describe(packed: int, roots_before: int) -> str:
    """Describe a published signature for an error message.

    In place of the root it holds a digest of the roots of all ops; `roots_before` is that of the ops before this one.
    """
    op = OPS[(packed & 15) - 1] if 0 < packed & 15 <= len(OPS) else "nothing"
    details = [str(DTYPES[packed >> 8 & 127]), f"{packed >> 27} elements"]
    if op in ("reduce", "broadcast", "gather", "scatter"):
        details.append(f"root {(packed >> 15) - 5 * roots_before - 1 & 0xFFF}")
    if reduction := _REDUCTIONS[packed >> 4 & 15]:
        details.append(reduction)
    return f"{op}({', '.join(details)})"


POINT_TO_POINT = frozenset(["send", "recv", "batch_send_recv"])
"""Ops that not all ranks issue alike."""


class Journal(Protocol):
    """Callbacks for the ops of one communicator. Ops are entered and left one at a time."""

    def enter(self, op: str, seq: int, nbytes: int, tensors: OpTensors, detail: Hashable, peer: int, /) -> None:
        """Op number `seq` begins. Must not raise.

        `detail` is what else must agree between ranks (a reduction, a tag). `peer` is the root or the other side of a
        message, -1 if there is none.
        """

    def leave(self, error: BaseException | None) -> None:
        """The op that was entered last has ended. Must not raise."""

    def waits(self, ranks: Sequence[int], gives: Sequence[int] = (), rounds: int = 0) -> None:
        """The running op is waiting to receive from `ranks`, and for `gives` to take what it sends. Must not raise.

        Called repeatedly during a long wait. `rounds` counts the rounds of messages that the op has begun.
        """


class Recorder(Protocol):
    """Makes a journal for each communicator."""

    def journal(self, name: str, epoch: int, rank: int, size: int, backend: str) -> Journal:
        """The journal of a new communicator."""
