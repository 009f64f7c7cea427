"""`TorchHooks`: calls the user's hooks around each op of a group, and at its abort (torch 2.14).

torch fires them where its C++ dispatcher calls a backend, and a process group in Python is called without it. There
torch attaches its checks for NaN, too (TORCH_DIST_NAN_CHECK=1). For a holdfast group both happen here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d

from holdfast.comms.errors import HoldfastError, OpTimeout, Unsupported
from holdfast.comms.torchdist.works import TorchWork
from holdfast.comms.work import Work

log = logging.getLogger("holdfast.comms")

c10d: Any = _distributed_c10d
"""torch's types of hooks are not in the stubs of torch before 2.14."""

_NAMES = {
    "reduce_scatter_single": "REDUCE_SCATTER_BASE",
    "reduce_scatter_single_coalesced": "REDUCE_SCATTER_TENSOR_COALESCED",
    "all_gather_single": "ALLGATHER_BASE",
    "all_gather_single_coalesced": "ALLGATHER_INTO_TENSOR_COALESCED",
    "gather_single": "GATHER",
    "all_to_all_single": "ALLTOALL_BASE",
    "recv_anysource": "RECV",
}
"""By the group's method, the member of torch's `HookOpName`, if that is not its name in capitals."""

_FROM_ROOT = ("broadcast", "scatter")
"""Only the root's inputs are sent: the others' may be memory that nobody has written."""

Hook = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class CompletedWork:
    """What a hook on completed ops gets: the fields of torch's `WorkInfo`, which has no constructor.

    `op_type` is torch's `HookOpName`, or the name of the group's method where torch has no such type.
    """

    op_type: Any
    seq: int
    time_started: datetime
    time_finished: datetime
    active_duration: timedelta


@dataclass(slots=True)
class TorchHooks:
    """The hooks of one group. Those of one kind run in the order of their ids."""

    rank: int
    refuse_nan: bool
    before: dict[int, Hook] = field(default_factory=dict)
    after: dict[int, Hook] = field(default_factory=dict)
    at_abort: dict[int, Callable[[], None]] = field(default_factory=dict)
    completed: list[Callable[[CompletedWork], None]] = field(default_factory=list)
    _issued: int = 0
    _pending: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)

    @property
    def wanted(self) -> bool:
        """Whether `run` does anything beside issuing an op."""
        return bool(self.refuse_nan or self.before or self.after or self.completed)

    def run(
        self,
        method: str,
        issue: Callable[[], TorchWork],
        inputs: Any = (),
        outputs: Any = (),
        root: int = -1,
        is_async: bool = True,
    ) -> TorchWork:
        """Issue an op between its hooks. NaN in its inputs, or an error of a hook before it, prevents that.

        `root` is -1 where there is none; for sends and receives it is the peer.
        """
        if not self.wanted:
            return issue()
        with self._lock:
            number = self._issued
            self._issued += 1
        if self.refuse_nan and (method not in _FROM_ROOT or root == self.rank):
            _check_nan(method, inputs)
        began = datetime.now(UTC)
        name = _name_of(method)
        if self.before:
            arguments = c10d.PreHookArgs()
            arguments.name, arguments.op_id, arguments.async_op, arguments.root = name, number, is_async, root
            arguments.input_tensors = list(_tensors(inputs))
            arguments.output_tensors = list(_tensors(outputs))
            _fire(self.before, arguments)
        work = issue()
        self._watch(method, number, began, work)
        if self.after:
            arguments = c10d.PostHookArgs()
            arguments.name, arguments.op_id, arguments.async_op, arguments.work = name, number, is_async, work
            _fire(self.after, arguments)
        return work

    def aborted(self, _: object) -> None:
        """Run the hooks of the abort."""
        for _, hook in sorted(self.at_abort.items()):
            try:
                hook()
            except Exception:
                log.exception("a hook at the abort of a process group failed")

    def wait_for_pending(self, timeout: float) -> None:
        """Wait until the hooks on completed ops have run for all ops so far. Raises `OpTimeout`."""
        with self._lock:
            if not self._lock.wait_for(lambda: not self._pending, timeout):
                raise OpTimeout("wait_for_pending_works", self._issued, timeout)

    def _watch(self, method: str, number: int, began: datetime, work: TorchWork) -> None:
        """Run the hooks on completed ops once all parts of `work` are done."""
        hooks, left = tuple(self.completed), len(work.parts)
        if not hooks or not left:
            return
        with self._lock:
            self._pending += 1

        def part_is_done(_: Work) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                if left:
                    return
            ended = datetime.now(UTC)
            found = CompletedWork(_name_of(method), number, began, ended, ended - began)
            try:
                for hook in hooks:
                    hook(found)
            finally:
                with self._lock:
                    self._pending -= 1
                    self._lock.notify_all()

        for part in work.parts:
            part.add_done_callback(part_is_done)


def _name_of(method: str) -> Any:
    names = getattr(c10d, "HookOpName", None)
    return method if names is None else getattr(names, _NAMES.get(method, method.upper()))


def check_available() -> None:
    """Raise `Unsupported` where torch has no hooks."""
    if not hasattr(c10d, "PreHookArgs"):
        raise Unsupported(f"hooks of a process group on torch {torch.__version__}", "they take torch 2.14")


def _fire(hooks: dict[int, Hook], arguments: Any) -> None:
    for _, hook in sorted(hooks.items()):
        hook(arguments)


def _check_nan(method: str, inputs: Any) -> None:
    for index, tensor in enumerate(_tensors(inputs)):
        values = tensor.detach()
        if values.layout == torch.sparse_coo:
            values = values.coalesce().values()
        if (values.is_floating_point() or values.is_complex()) and bool(torch.isnan(values).any()):
            raise HoldfastError(
                f"{method}: input tensor {index} holds NaN, which TORCH_DIST_NAN_CHECK=1 refuses; the op was not "
                "issued on this rank"
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value or ():
            yield from _tensors(part)
