"""The nccl transport over other groups of torch in NCCL's place, for machines without a GPU.

A plugin to be registered by hand (`comms.register`): its backend `nccl-stand-in` runs the code of the nccl backend over
torch's gloo group and host memory. What NCCL and a GPU do themselves is imitated: a queue runs the ops in order, and a
call returns once its op is queued; an abort takes as long as NCCL's.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from holdfast.backends.common.torch_group import TorchGroup
from holdfast.backends.common.torch_group import options as options_of
from holdfast.backends.gloo.connecting import connect_group, shut_down
from holdfast.backends.nccl.streams import StreamWork, wait_for
from holdfast.backends.nccl.torch_groups import ends
from holdfast.backends.nccl.transport import NcclTransport, connected
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS, REDUCIBLE
from holdfast.comms.errors import HoldfastError, StillRunning
from holdfast.comms.ops import OpPlan
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, hookimpl
from holdfast.comms.system import forks
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context
from holdfast.comms.transport.liveness import Liveness
from holdfast.comms.work import Work

Tensor = torch.Tensor

NAME = "nccl-stand-in"
abort_seconds = 0.53
"""How long an abort takes here: what ProcessGroupNCCL took on one H100."""


class LikeNccl:
    """torch's gloo group, with the few calls that only NCCL's has. Each op is complete when its call returns."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._together: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        if average := getattr(options.reduceOp, "op", None) == dist.ReduceOp.AVG:
            given, options = options, options_of(dist.AllreduceOptions, options.timeout)
            options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, given.asyncOp
        self._group.allreduce(tensors, options).wait()
        if average:
            tensors[0].div_(self._group.size())

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        self._group.broadcast(tensors, options).wait()

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        """gloo leaves partial sums on the ranks that are not the root."""
        total = options_of(dist.AllreduceOptions, options.timeout, reduceOp=options.reduceOp)
        mine = tensors[0].clone()
        self.allreduce([mine], total)
        if options.rootRank == self._group.rank():
            tensors[0].copy_(mine)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> None:
        taken = torch.empty(sum(each.numel() for each in outputs), dtype=torch.uint8, device="cpu")
        sizes = [each.numel() for each in outputs]
        self._group.alltoall_base(taken, torch.cat(inputs), sizes, [each.numel() for each in inputs], options).wait()
        for output, part in zip(outputs, torch.split(taken, sizes), strict=True):
            output.copy_(part)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> None:
        self._group.allgather(outputs, inputs, options).wait()

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any) -> None:
        self._group._allgather_base(output.view(-1), tensor.view(-1), options).wait()

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any) -> None:
        limit = options_of(dist.AllreduceOptions, options.timeout, reduceOp=options.reduceOp)
        whole = whole.clone()
        self.allreduce([whole], limit)
        output.copy_(whole.view(self._group.size(), -1)[self._group.rank()].view(output.shape))

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> None:
        assert self._together is not None
        self._together.append(self._group.send(tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> None:
        assert self._together is not None
        self._together.append(self._group.recv(tensors, src, tag))

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> Any:
        together, self._together = self._together or [], None
        return SimpleNamespace(wait=lambda: [work.wait() for work in together])

    def abort(self) -> None:
        """Do nothing: no op is under way."""


class OneRank:
    """torch's group that does nothing, which is what the ops of one rank do. A call costs what a call of torch does."""

    def __init__(self) -> None:
        group: Any = FakeProcessGroup._create_internal(0, 1)
        self.allreduce, self.broadcast = group.allreduce, group.broadcast

    def shutdown(self, *_: object) -> None:
        """Does nothing: no op lasts."""

    abort = _set_default_timeout = shutdown


class OnTheHost(NcclTransport):
    """The nccl transport without streams, processes or a watcher. A call of its group completes the op."""

    streams: ClassVar[bool] = False

    def __init__(self, rank: int, size: int, store: dist.Store, group: Any = None) -> None:
        self.rank, self.size, self._epoch, self._seq = rank, size, 0, 0
        self._error: HoldfastError | None = None
        self._ended = False
        self._store = None
        self._liveness = Liveness([], rank)
        self._ending = threading.RLock()
        self._on_the_host()
        self._begin(
            LikeNccl(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))) if group is None else group
        )

    def _on_the_host(self) -> None:
        self._device = torch.device("cpu")
        self._side = SimpleNamespace(release=lambda: None, entered=contextlib.nullcontext)
        self._flag = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def _stream_here(self) -> Any:
        return contextlib.nullcontext

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        op()
        return HostWork(name, self._device, self._passed(), self._check)

    def async_function(self, plan: OpPlan) -> Callable[..., Work] | None:
        """The ops that are one call of torch's group are launched; the worker runs others: they wait in between."""
        return None if self._straight(plan)[1] is None else partial(self._launch_planned, plan.op, self._queue(plan))

    def _queue(self, plan: OpPlan) -> Callable[..., None]:
        return NcclTransport.function(self, plan)

    def _passed(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def _forget_peers(self) -> None:
        """Does nothing: this transport watches no peers."""

    _all_gather_of_host = NcclTransport._all_gather_of_device


class HostWork(StreamWork):
    """An op on host memory, which no stream orders: `wait` waits for the op itself."""

    def wait(self, timeout: float | None = None) -> None:
        self._failed()
        if not wait_for(self._event, math.inf if timeout is None else time.monotonic() + timeout, self._failed):
            raise StillRunning(self._name, timeout or 0.0)


class Queue:
    """A stream of the imitated device: runs ops in order, in a thread. An op that fails ends those behind it."""

    def __init__(self, name: str) -> None:
        self._added = threading.Condition()
        self._ops: list[tuple[Callable[[], object], float]] = []
        self.done = 0
        self.count = 0
        self.failure: BaseException | None = None
        self._late = self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"holdfast-{name}-queue", daemon=True)
        self._thread.start()

    def add(self, op: Callable[[], object], seconds: float) -> None:
        with self._added:
            self._ops.append((op, time.monotonic() + seconds))
            self.count += 1
            self._added.notify()

    def is_late(self) -> bool:
        """Whether the running op, or the one that failed, has exceeded its time."""
        with self._added:
            return self._late or (bool(self._ops) and time.monotonic() > self._ops[0][1])

    def _run(self) -> None:
        while True:
            with self._added:
                self._added.wait_for(lambda: self._ops or self._closed)
                if not self._ops:
                    return
                op, limit = self._ops[0]
            try:
                if self.failure is None:
                    op()
            except BaseException as error:  # gloo has a timeout of its own, at the same time
                self.failure, self._late = error, time.monotonic() > limit
            with self._added:
                del self._ops[0]
                self.done += self.failure is None

    def close(self) -> None:
        with self._added:
            self._closed = True
            self._added.notify()
        self._thread.join()


class QueuedGroup:
    """As `LikeNccl`, but ops run in a queue. An abort ends the blocked one, and takes `seconds`."""

    def __init__(self, group: Any, connections: list[Any], seconds: float) -> None:
        self._group, self._at_once, self._connections, self._seconds = group, LikeNccl(group), connections, seconds
        self.queue = Queue(NAME)

    def __getattr__(self, name: str) -> Callable[..., None]:
        op = getattr(self._at_once, name)
        if name in ("_start_coalescing", "send", "recv"):  # they start at once
            return op
        return lambda *arguments: self.queue.add(lambda: op(*arguments), self._seconds)

    def _end_coalescing(self) -> None:
        """The sends and receives have started; wait for them in the queue."""
        self.queue.add(self._at_once._end_coalescing().wait, self._seconds)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def get_error(self) -> Any:
        """As torch's watchdog finds it."""
        kind = "TIMEOUT" if self.queue.is_late() else "COMM_ERROR" if self.queue.failure is not None else "SUCCESS"
        return SimpleNamespace(name=kind)

    def abort(self) -> None:
        for connection in self._connections:
            shut_down(connection)
        time.sleep(abort_seconds)
        self._release()

    def shutdown(self) -> None:
        """Wait for the others to do so too, as NCCL does."""
        self._group.barrier().wait()
        self._release()

    def _release(self) -> None:
        self.queue.close()
        if self.queue.failure is not None:
            forks.never_destroy(self._group)
        for connection in self._connections:
            connection.close()
        self._connections.clear()


class StandInTransport(OnTheHost):
    """The nccl transport between processes of hosts without a GPU, over a `QueuedGroup`."""

    _close_seconds: ClassVar[float] = 0.5

    _forget_peers = TorchGroup._forget_peers

    def __init__(self, context: Context) -> None:
        TorchGroup.__init__(self, context)
        self._ended = False
        self._on_the_host()
        try:
            group, connections = connect_group(context, self._liveness)
        except BaseException:
            self._forget_peers()
            raise
        self._begin(QueuedGroup(group, connections, 60.0))
        self._watch_peers(NAME)

    def _passed(self) -> Any:
        queue = self._group.queue
        return SimpleNamespace(query=lambda count=queue.count: queue.done >= count)

    def _call(self, op: str, deadline: float, start: Callable[..., Any], *arguments: Any) -> None:
        """Wait for each op: the caller reads host memory, which no stream orders."""
        super()._call(op, deadline, start, *arguments)
        self._wait(op, deadline)

    def function(self, plan: OpPlan) -> Callable[..., None]:
        call = self._queue(plan)

        def and_wait(*arguments: Any) -> None:
            call(*arguments)
            self._wait(plan.op, arguments[-1])

        return and_wait


def connect(context: Context) -> NcclTransport:
    """As `transport.connect_over`; one rank has the group that costs nothing, `OneRank`."""
    ends.check()
    if context.size == 1:
        return OnTheHost(0, 1, context.store, OneRank())
    return connected(StandInTransport(context), context, NAME)


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name=NAME,
            api=API_VERSION,
            description="the nccl backend over torch's gloo group and host memory: for tests, without a GPU",
            capabilities=Capabilities(
                reduces={"cpu": names((*REDUCIBLE, *EIGHT_BIT_FLOATS))}, moves={"cpu": names(DTYPES)}
            ),
            probe=Available,
            connect=connect,
        )
    ]
