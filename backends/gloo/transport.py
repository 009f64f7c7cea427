"""`gloo`: torch's own ProcessGroupGloo, over TCP, between any processes and hosts. CPU tensors.

Gloo cannot abort: only shutting down the group's sockets ends a blocked op, so this transport keeps a duplicate of
each. A watcher thread also shuts them down when the kernel reports the death of a peer on this host. What gloo lacks
(uneven lists, dtypes it does not reduce, minima and maxima that keep NaNs) is built from its all-to-all and all-gather
of bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.backends.common.tcp_channel import TcpChannel
from holdfast.backends.common.torch_group import TorchGroup, bytes_of, options
from holdfast.backends.gloo.connecting import (
    THREADS,
    abandon,
    are_lost,
    connect_group,
    destroy_abandoned,
    meaning_of,
    shut_down,
    sockets,
)
from holdfast.comms import _native, arithmetic
from holdfast.comms.errors import HoldfastError, Mismatch, OpTimeout, PeerFailed, Revoked, Unsupported, describe
from holdfast.comms.onesided.requests import Requests, RequestService
from holdfast.comms.ops import TAGS, OpPlan, ReduceOp
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    Unavailable,
    hookimpl,
)
from holdfast.comms.system import forks
from holdfast.comms.system.files import OwnedDescriptor
from holdfast.comms.system.local_causes import local_cause
from holdfast.comms.system.waiting import POLL, run_interruptible
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context, WindowMemory
from holdfast.comms.transport.liveness import PeerWatch

Tensor = torch.Tensor
Message = tuple[Tensor, int, int]
"""(tensor, peer, tag)"""

_NATIVE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "premul_sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_GRACE_SECONDS = 0.2
"""How long an op waits, after its connection broke, for the kernel to report a dead process, and for gloo to end it."""

_WAIT_SECONDS = 0.02
_WAIT = timedelta(seconds=_WAIT_SECONDS)
"""How long one wait lasts before it checks for an abort; usually an aborted op ends with its connections."""

_CALLS = 256
"""The number of cached calls."""


class _ConnectionsLost(RuntimeError):
    """The peers have closed all connections, and gloo has forgotten an op that needed them."""


class GlooTransport(TorchGroup):
    """A ProcessGroupGloo that can be aborted."""

    ends_before_exit = True
    medium = "tcp"

    def __init__(self, context: Context) -> None:
        self._sockets: list[OwnedDescriptor] = []
        self._calls: dict[tuple[Any, ...], _native.OpCall] = {}
        self._service: RequestService | None = None
        self._channel: TcpChannel | None = None
        self._windows_over: HoldfastError | None = None
        self._shut_down = False
        super().__init__(context)
        try:
            self._group, self._sockets = connect_group(context, self._liveness)
        except BaseException:
            self._forget_peers()
            raise
        forks.reset_in_children(self)
        self._watch_peers("gloo")

    def reset_in_child(self) -> None:
        """Close the connections in a forked child: otherwise they would stay up when its parent dies."""
        inodes = {os.fstat(each).st_ino for each in self._sockets if each.ours}
        forks.replace_by_dev_null(number for number, inode in sockets() if inode in inodes)

    # -- windows

    def window(self, tensor: Tensor, deadline: float) -> WindowMemory:
        if self._service is None:
            watch = PeerWatch(self._liveness, self._check_live)
            self._service = RequestService(self.rank, self.size, watch, partial(self._open_channel, watch, deadline))
        return self._service.window(self, tensor, deadline)

    def _open_channel(self, watch: PeerWatch, deadline: float, requests: Requests) -> TcpChannel:
        host = ""
        if self._sockets:
            with socket.socket(fileno=os.dup(self._sockets[0])) as own:
                host = own.getsockname()[0]
        self._channel = TcpChannel(self, host, watch, deadline, requests)
        return self._channel

    def _check_live(self) -> Sequence[int]:
        """Raise if the communicator was aborted, here or elsewhere. Windows outlive the death of another rank."""
        if self._windows_over is not None:
            raise self._windows_over.again()
        if self._channel is not None and self._channel.aborted:
            raise Revoked(self._epoch, f"rank {min(self._channel.aborted)} aborted it")
        return ()

    def abort(self, error: HoldfastError) -> None:
        if self._windows_over is None:
            self._windows_over = error
        super().abort(error)
        if self._channel is not None:
            self._channel.shut_down()

    def _peers_ended(self, error: PeerFailed) -> None:
        super().abort(error)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        super().close()

    # -- running and ending an op

    def _collective(
        self, op: str, method: str, given: tuple[Any, ...], kind: Any, deadline: float, detail: str | int = 0
    ) -> None:
        """Run `group.method(*given, options)` by the deadline; `detail` is the reduction or the root."""
        left = deadline - time.monotonic()
        self._op_call(op, method, kind, int(left) + 1 if left > _WAIT_SECONDS else 0, detail)(*given, deadline)

    def _op_call(self, op: str, method: str, kind: Any, seconds: int, detail: str | int) -> _native.OpCall:
        """The calls of a method of the group, with options of their `kind`.

        The options have a timeout in whole seconds, so this transport keeps the deadline itself: one wait is short.
        """
        key = op, method, seconds, detail
        if (known := self._calls.get(key)) is not None:
            return known
        if len(self._calls) >= _CALLS:
            self._calls.clear()
        given, limit = options(kind, timedelta(seconds=max(seconds, 1))), _limit(seconds)
        if kind is dist.AllreduceOptions:
            given.reduceOp = _NATIVE_OPS[str(detail)]
        elif kind is dist.BroadcastOptions:
            given.rootRank = detail
        of_one_tensor = kind in (dist.AllreduceOptions, dist.BroadcastOptions)

        def start(*arguments: Any) -> Any:
            self._seq += 1
            if self._error is not None:
                raise self._error.again()
            if of_one_tensor:
                return getattr(self._group, method)([arguments[0]], given)
            return getattr(self._group, method)(*arguments[:-1], given)

        def finish_late(work: Any, error: RuntimeError | None, *arguments: Any) -> None:
            self._wait_again(op, limit, work, error, arguments[-1])

        call = self._calls[key] = _native.OpCall(start, methodcaller("wait", limit), finish_late)
        return call

    def _wait_again(self, op: str, waited: timedelta, work: Any, error: RuntimeError | None, deadline: float) -> None:
        """Continue after the first error of a collective, which may only mean that it takes longer than `waited`."""
        timed_out = error is None or meaning_of(error) == "timeout"
        began = time.monotonic() - (waited.total_seconds() if timed_out else 0.0)
        try:
            if work is None and error is not None:
                raise error
            self._wait(work, deadline)
        except HoldfastError:  # that of an abort before it
            raise
        except RuntimeError as last:
            raise self._explain(op, last, began, deadline, ()) from last

    def _run(self, op: str, body: Callable[[], Any], deadline: float, awaited: Sequence[int] = ()) -> None:
        """Run `body()`, which keeps the deadline. `awaited`: the ranks that it waits for, if known."""
        self._seq += 1
        if self._error is not None:
            raise self._error.again()
        began = time.monotonic()
        ended: list[float] = []

        def look() -> None:
            """Gloo forgets some messages when their connection closes."""
            if ended or self._connections_ended():
                ended.append(time.monotonic())
                if ended[-1] > ended[0] + _GRACE_SECONDS:
                    self.interrupted = True
                    if self._error is not None:
                        raise self._error.again()
                    raise _ConnectionsLost("Connection closed by all peers")

        try:
            if threading.current_thread() is threading.main_thread():
                run_interruptible(body, look)  # gloo waits in C++, where Ctrl-C has no effect
            else:
                body()  # a thread for each message of another thread doubles its time
        except HoldfastError:
            raise
        except RuntimeError as error:
            raise self._explain(op, error, began, deadline, awaited) from error

    def _wait(self, work: Any, deadline: float) -> None:
        """Wait for a collective. If it does not end soon after the connections did, abandon it, and the group with it.

        Gloo sometimes forgets an op if its connections are closed under it: by an abort here, or by all peers. Not for
        sends and receives: a timeout of such a wait closes all connections of the group.
        """
        ended: float | None = None
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(_limit(left))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the failure of the op, or returns if it ended after the last check
                    return
                if left <= _WAIT_SECONDS:
                    raise
                if ended is None and self._connections_ended():
                    ended = time.monotonic()
                elif ended is not None and time.monotonic() > ended + _GRACE_SECONDS:
                    abandon(self._group, work)
                    if self._error is None:
                        raise _ConnectionsLost("Connection closed by all peers") from None
                    raise

    def _explain(
        self, op: str, error: RuntimeError, began: float, deadline: float, awaited: Sequence[int]
    ) -> HoldfastError:
        """Translate a failure of gloo: this rank's abort, the end of a peer, a timeout, or a broken connection."""
        meaning = "connection" if isinstance(error, _ConnectionsLost) else meaning_of(error)
        until = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if meaning == "connection":
            POLL.reaches(lambda: self._error is not None, until)
        if self._error is not None:
            return self._error.again()
        if meaning == "connection" and (ended := self._reason_of_another()) is not None:
            return ended
        if (cause := local_cause(error, op)) is not None:
            return cause
        if meaning == "local":
            return HoldfastError(f"{op} (op {self._seq}) failed in this process, by no peer's fault: {describe(error)}")
        waited = time.monotonic() - began
        if meaning == "timeout" or time.monotonic() >= deadline:
            return OpTimeout(op, self._seq, waited, awaited)
        return PeerFailed((), f"{op} (op {self._seq}) lost a connection: {str(error).splitlines()[0]}")

    def _connections_ended(self) -> bool:
        """Whether all connections are closed: by an abort here, or by the peers."""
        return self._shut_down or are_lost(list(self._sockets))

    def _end_group(self) -> None:
        for each in list(self._sockets):
            shut_down(each)
        self._shut_down = True

    def _release_group(self) -> None:
        if self.interrupted:
            forks.never_destroy(self._group)
        self._calls.clear()  # they refer to this transport
        del self._group
        with self._ending:
            if self._error is not None:
                self._end_group()  # a signal's handler may close amid the abort that does so
            for each in self._sockets:
                each.close()
            self._sockets.clear()
        destroy_abandoned()

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.prescale(tensor, op)
        if _reduces(tensor.dtype, op):
            if given is not tensor:
                tensor.copy_(given)
            self._collective("all_reduce", "allreduce", (tensor,), dist.AllreduceOptions, deadline, op.name)
        else:
            others = [torch.empty_like(given) for _ in range(self.size)]
            self.all_gather(others, given, deadline)
            _combine(others, tensor, op)
        arithmetic.postscale(tensor, op, self.size)

    def function(self, plan: OpPlan) -> Callable[..., None]:
        kind, detail = self._native_options(plan)
        if kind is None:
            return super().function(plan)
        method = "allreduce" if plan.op == "all_reduce" else plan.op
        return self._op_call(plan.op, method, kind, int(plan.timeout) + 1, detail)

    def _native_options(self, plan: OpPlan) -> tuple[Any, str | int]:
        """The options and the reduction or root of an op that gloo runs on a tensor directly; else None."""
        if plan.op == "broadcast" and plan.dtype in _NATIVE_DTYPES and plan.nbytes:
            return dist.BroadcastOptions, plan.root
        if plan.op != "all_reduce" or plan.reduction is None or plan.dtype is None:
            return None, 0
        own = _reduces(plan.dtype, plan.reduction) and plan.reduction.name not in arithmetic.SCALED
        return (dist.AllreduceOptions, plan.reduction.name) if own else (None, 0)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        given = arithmetic.prescale(tensor, op)
        gathered = [torch.empty_like(given) for _ in range(self.size)] if self.rank == dst else None
        self.gather(given, gathered, dst, deadline)
        if gathered is not None:
            _combine(gathered, tensor, op)
            arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        given = [arithmetic.prescale(tensor, op) for tensor in inputs]
        received = [torch.empty_like(given[self.rank]) for _ in range(self.size)]
        self._exchange("reduce_scatter", received, given, deadline)
        _combine(received, output.view(-1), op)
        arithmetic.postscale(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        if tensor.numel() == 0:
            return
        self._collective("broadcast", "broadcast", (_movable(tensor),), dist.BroadcastOptions, deadline, src)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if len({output.nbytes for output in outputs}) > 1:
            self._exchange("all_gather", outputs, [tensor] * self.size, deadline)
            return
        if tensor.numel() == 0:
            return
        given = [[bytes_of(output) for output in outputs]], [bytes_of(tensor)]
        self._collective("all_gather", "allgather", given, AllgatherOptions, deadline)

    def all_gather_single(self, output: Tensor, tensor: Tensor, deadline: float) -> None:
        if tensor.numel() == 0:
            return
        given = _movable(output.view(-1)), _movable(tensor.view(-1))
        self._collective("all_gather", "_allgather_base", given, AllgatherOptions, deadline)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, deadline: float) -> None:
        share = [tensor.nbytes // self.size] * self.size
        given = bytes_of(output), bytes_of(tensor), share, share
        self._collective("all_to_all", "alltoall_base", given, dist.AllToAllOptions, deadline)

    def _exchange(self, op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        """Send `inputs[j]` to rank j, on every rank, as bytes, by gloo's all-to-all with splits."""
        given = torch.cat([bytes_of(tensor) for tensor in inputs])
        taken = torch.empty(sum(t.nbytes for t in outputs), dtype=torch.uint8, device="cpu")
        sizes = [t.nbytes for t in outputs], [t.nbytes for t in inputs]
        self._collective(op, "alltoall_base", (taken, given, *sizes), dist.AllToAllOptions, deadline)
        start_of = 0
        for output in outputs:
            bytes_of(output).copy_(taken[start_of : start_of + output.nbytes])
            start_of += output.nbytes

    def barrier(self, deadline: float) -> None:
        self._collective("barrier", "barrier", (), dist.BarrierOptions, deadline)

    # -- point to point: a header precedes each message, since one larger than its tensor would abort the process

    def send(self, tensor: Tensor, dst: int, tag: int, deadline: float) -> None:
        self._messages("send", [(tensor, dst, tag)], [], deadline, [dst])

    def recv(self, tensor: Tensor, src: int, tag: int, deadline: float) -> None:
        self._messages("recv", [], [(tensor, src, tag)], deadline, [src])

    def batch_send_recv(
        self,
        sends: Sequence[tuple[Tensor, int, int]],
        recvs: Sequence[tuple[Tensor, int, int]],
        deadline: float,
    ) -> None:
        self._messages("batch_send_recv", sends, recvs, deadline)

    def _messages(
        self, op: str, sends: Sequence[Message], recvs: Sequence[Message], deadline: float, awaited: Sequence[int] = ()
    ) -> None:
        self._run(op, partial(exchange, self._group, self.rank, sends, recvs, deadline), deadline, awaited)


def exchange(group: Any, rank: int, sends: Sequence[Message], recvs: Sequence[Message], deadline: float) -> None:
    """Send and receive these messages over a group of torch, in which this is `rank`."""
    headers = [torch.empty(2, dtype=torch.int64, device="cpu") for _ in recvs]
    given = [_header_of(tensor) for tensor, _, _ in sends]
    coming = [group.recv([into], src, tag) for into, (_, src, tag) in zip(headers, recvs, strict=True)]
    going = [group.send([header], dst, tag) for header, (_, dst, tag) in zip(given, sends, strict=True)]
    going += [group.send([bytes_of(tensor)], dst, TAGS + tag) for tensor, dst, tag in sends if tensor.nbytes]
    for header, work, (tensor, src, tag) in zip(headers, coming, recvs, strict=True):
        work.wait(_left(deadline))
        _check_header(header, tensor, src, rank, tag)
        if tensor.nbytes:
            going.append(group.recv([bytes_of(tensor)], src, TAGS + tag))
    for work in going:
        work.wait(_left(deadline))


def _header_of(tensor: torch.Tensor) -> torch.Tensor:
    """The header of a message, which gloo has none of: its size and dtype."""
    return torch.tensor([tensor.nbytes, DTYPES.index(tensor.dtype)], dtype=torch.int64, device="cpu")


def _check_header(header: torch.Tensor, tensor: torch.Tensor, src: int, rank: int, tag: int) -> None:
    """Raise `Mismatch` unless the message that follows fits into `tensor`."""
    nbytes, code = header.tolist()
    if (nbytes, DTYPES[code]) != (tensor.nbytes, tensor.dtype):
        raise Mismatch(
            f"rank {src} sent {nbytes} bytes of {DTYPES[code]} under tag {tag}, rank {rank} receives {tensor.nbytes} "
            f"of {tensor.dtype}; both sides must pass the same shape and dtype"
        )


def _reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether gloo reduces this as torch does elsewhere: gloo's minima and maxima drop NaNs."""
    return dtype in _NATIVE_DTYPES and not (dtype.is_floating_point and op.name in ("min", "max"))


def _limit(left: float) -> timedelta:
    """The duration of one wait, given the seconds left."""
    return _WAIT if left > _WAIT_SECONDS else timedelta(seconds=max(left, 0.001))


def _left(deadline: float) -> timedelta:
    """The time left, or a moment in which to find what is complete already."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _movable(tensor: Tensor) -> Tensor:
    """View a contiguous tensor in a form that gloo moves: as bytes, if it does not know the dtype."""
    return tensor if tensor.dtype in _NATIVE_DTYPES else bytes_of(tensor)


def _combine(inputs: Sequence[Tensor], output: Tensor, op: ReduceOp) -> None:
    """Reduce all inputs into `output`, in rank order."""
    output.view(-1).copy_(inputs[0].view(-1))
    for each in inputs[1:]:
        arithmetic.combine(output, each, op)


def connect(context: Context) -> GlooTransport:
    """Make the group; collective over all ranks of the context."""
    if context.device.type != "cpu":
        raise Unsupported(f"gloo on {context.device}", "use nccl for CUDA tensors, or a CPU device")
    return GlooTransport(context)


def probe() -> Available | Unavailable:
    """Whether this torch was built with gloo."""
    if not dist.is_available() or not dist.is_gloo_available():
        return Unavailable("this torch was built without gloo", "install a torch wheel from pypi.org")
    return Available(f"torch {torch.__version__}")


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="gloo",
            api=API_VERSION,
            description="torch's ProcessGroupGloo over TCP, on one host or many",
            capabilities=Capabilities(
                reduces={"cpu": names(arithmetic.REDUCIBLE)},
                moves={"cpu": names(DTYPES)},
                windows=True,
                atomics=True,
                passive_target="thread",
                tcp="always",
            ),
            probe=probe,
            connect=connect,
            auto={"cpu": 50},
            hints=(
                Hint("interface", str, "the network interface of this host for all connections, such as 'eth0'"),
                Hint("threads", int, "threads of a communicator that move its bytes", THREADS, least=1, most=64),
            ),
        )
    ]
