"""`Hooks`: calls the user's hooks before and after each op of a group, as torch does from 2.14 on.

torch fires them where its C++ dispatcher calls a backend, and a process group in Python is called without it. There
torch attaches its checks for NaN, too (TORCH_DIST_NAN_CHECK=1). For a holdfast group both happen here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _distributed_c10d

from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.system.environment import flag
from holdfast.comms.torchdist.works import TorchWork

c10d: Any = _distributed_c10d
"""torch's types of hooks are not in the stubs of torch before 2.14."""

_NAMES = {
    "allreduce": "ALLREDUCE",
    "allreduce_coalesced": "ALLREDUCE_COALESCED",
    "reduce": "REDUCE",
    "reduce_scatter": "REDUCE_SCATTER",
    "reduce_scatter_single": "REDUCE_SCATTER_BASE",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "broadcast": "BROADCAST",
    "allgather": "ALLGATHER",
    "allgather_coalesced": "ALLGATHER_COALESCED",
    "all_gather_single": "ALLGATHER_BASE",
    "all_gather_single_coalesced": "ALLGATHER_INTO_TENSOR_COALESCED",
    "gather": "GATHER",
    "gather_single": "GATHER",
    "scatter": "SCATTER",
    "alltoall": "ALLTOALL",
    "all_to_all_single": "ALLTOALL_BASE",
    "barrier": "BARRIER",
    "send": "SEND",
    "recv": "RECV",
    "recv_anysource": "RECV",
}
"""By the group's method, the member of torch's `HookOpName`."""

_FROM_ROOT = ("broadcast", "scatter")
"""Only the root's inputs are sent: the others' may be memory that nobody has written."""

Hook = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class IssuedOp:
    """One op that is about to be issued. `root` is -1 where there is none; for sends and receives it is the peer."""

    method: str
    inputs: Any = ()
    outputs: Any = ()
    root: int = -1
    is_async: bool = True


@dataclass(slots=True)
class Hooks:
    """The hooks of one group. Those of one kind run in the order of their ids."""

    rank: int
    refuse_nan: bool
    before: dict[int, Hook] = field(default_factory=dict)
    after: dict[int, Hook] = field(default_factory=dict)
    _issued: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wanted(self) -> bool:
        """Whether `run` does anything beside issuing an op."""
        return bool(self.refuse_nan or self.before or self.after)

    def run(self, op: IssuedOp, issue: Callable[[], TorchWork]) -> TorchWork:
        """Issue an op between its hooks. NaN in its inputs, or an error of a hook before it, prevents that."""
        if not self.wanted:
            return issue()
        with self._lock:
            number = self._issued
            self._issued += 1
        if self.refuse_nan and (op.method not in _FROM_ROOT or op.root == self.rank):
            _check_nan(op)
        if not (self.before or self.after):
            return issue()
        name = getattr(c10d.HookOpName, _NAMES[op.method])
        if self.before:
            arguments = c10d.PreHookArgs()
            arguments.name, arguments.op_id, arguments.async_op, arguments.root = name, number, op.is_async, op.root
            arguments.input_tensors = list(_tensors(op.inputs))
            arguments.output_tensors = list(_tensors(op.outputs))
            _fire(self.before, arguments)
        work = issue()
        if self.after:
            arguments = c10d.PostHookArgs()
            arguments.name, arguments.op_id, arguments.async_op, arguments.work = name, number, op.is_async, work
            _fire(self.after, arguments)
        return work


def nan_check_is_on() -> bool:
    """Whether TORCH_DIST_NAN_CHECK is on."""
    return flag("TORCH_DIST_NAN_CHECK")


def check_available() -> None:
    """Raise `Unsupported` where torch has no hooks."""
    if not hasattr(c10d, "PreHookArgs"):
        raise Unsupported(f"hooks of a process group on torch {torch.__version__}", "they take torch 2.14")


def _fire(hooks: dict[int, Hook], arguments: Any) -> None:
    for _, hook in sorted(hooks.items()):
        hook(arguments)


def _check_nan(op: IssuedOp) -> None:
    for index, tensor in enumerate(_tensors(op.inputs)):
        values = tensor.detach()
        if values.layout == torch.sparse_coo:
            values = values.coalesce().values()
        if (values.is_floating_point() or values.is_complex()) and bool(torch.isnan(values).any()):
            raise HoldfastError(
                f"{op.method}: input tensor {index} holds NaN, which TORCH_DIST_NAN_CHECK=1 refuses; the op was not "
                "issued on this rank"
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value or ():
            yield from _tensors(part)
