"""`nccl`: torch's own group over NCCL, for tensors of NVIDIA GPUs. `rccl` is the same over AMD's library.

Ops have torch's stream semantics: a synchronous op is queued on the current stream when it returns, an asynchronous one
runs beside it, and neither waits for the device, so CUDA graphs can hold them. A hung op ends by `abort` from any
thread, by a peer's death, which a watcher learns from the kernel, or by its timeout, which torch's watchdog notices.
The next op, or a wait, raises the failure. Barriers and objects wait for the device. The group of an aborted
communicator ends beside the program (`torch_groups.BackgroundEnds`): the next one connects meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.backends.common.torch_group import DEATH_SECONDS, TorchGroup, bytes_of, options, wait_for_ranks
from holdfast.backends.nccl.device_reduction import PLAIN, combine, device_reduction_of
from holdfast.backends.nccl.streams import LONGEST_SECONDS, SideStream, passed, until, wait_for, within
from holdfast.backends.nccl.torch_groups import (
    LEGACY,
    CallingThread,
    blocks,
    ends,
    failure_of_end,
    kind_of_group,
    make_group,
    marks_open_group,
    run_as_group,
    set_timeout,
    this_thread,
)
from holdfast.comms._native import OpCall
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS, REDUCIBLE
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Unsupported, again
from holdfast.comms.ops import OpPlan, ReduceOp
from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.system.waiting import POLL, run_interruptible
from holdfast.comms.tensors.packing import DTYPES, names
from holdfast.comms.transport.base import Context
from holdfast.comms.work import Work

Tensor = torch.Tensor

_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_OF_ONE_TENSOR = ("all_reduce", "broadcast")
_LOOK_SECONDS = 0.05
"""Seconds between checks whether torch's watchdog has ended the group."""

_GRACE_SECONDS = 2 * (DEATH_SECONDS + _LOOK_SECONDS)
"""How long an op that failed waits for what has ended its group, which tells more than NCCL: twice a watcher's time."""
_TIMEOUT_STEP = 0.1
"""The interval at which torch's watchdog checks timeouts: finer ones make no difference."""

_ABORT_SECONDS = 10.0
"""How long an abort is waited for. torch raises if it takes longer than the group's timeout, set to the same."""

HINTS = (
    Hint("min_ctas", int, "the fewest thread blocks of a collective (ncclConfig_t.minCTAs)", least=1, most=64),
    Hint("max_ctas", int, "the most thread blocks of a collective (ncclConfig_t.maxCTAs)", least=1, most=64),
    Hint("cga_cluster_size", int, "thread blocks of one cluster (ncclConfig_t.cgaClusterSize)", least=0, most=8),
    Hint("split_share", bool, "share resources with communicators split from this one (ncclConfig_t.splitShare)"),
)

_ASKING_SECONDS = 60.0
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_cuda: Any = torch.cuda


class NcclTransport(TorchGroup):
    """A ProcessGroupNCCL that can be aborted."""

    streams: ClassVar[bool] = True
    _look_seconds = _LOOK_SECONDS
    _close_seconds: ClassVar[float] = 5.0
    """How long `close` waits for the other ranks to close too, before it leaves without them."""

    def __init__(self, context: Context, name: str) -> None:
        super().__init__(context)
        self._ended = False
        try:
            self.device = self._device = own_device(context)
            self._begin(make_group(context, self._device))
        except BaseException:
            self._forget_peers()
            raise
        self._watch_peers(name)
        self._side = SideStream(self._device, self._check)
        self._flag = torch.zeros(1, dtype=torch.uint8, device=self._device)

    def _begin(self, group: Any) -> None:
        self._group = group
        self._limit = 0.0
        self._calls = CallingThread(self._stream_here)

    def _stream_here(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """Return a function that makes the current stream current in another thread."""
        stream = torch.cuda.current_stream(self._device)
        return lambda: torch.cuda.stream(stream)

    def connect_ranks(self, deadline: float, over: Callable[[], HoldfastError | None]) -> None:
        """Connect the ranks, which are all there. NCCL connects them with the first op, a barrier here.

        If a rank dies or hangs meanwhile, the op blocks with the communicator's lock held, so an abort has no effect.
        The op is then abandoned. It ends once that rank's process does, or by the bound of `bound_handshakes`.
        """
        began = time.monotonic()

        def look() -> None:
            self._check()
            if (reason := over()) is not None:
                raise again(reason)
            if time.monotonic() > deadline:
                raise OpTimeout("connect", 0, time.monotonic() - began)

        def first_op() -> None:
            with self._side.entered():  # the current stream may still hold an op of the communicator before
                self.barrier(deadline)

        run_interruptible(first_op, look, delays_exit=not blocks())

    # -- queueing and ending an op

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        return self._side.launch(name, op)

    def settle(self, deadline: float) -> None:
        self._side.wait(deadline)  # at the deadline `_wait` raises
        self._wait("settle", deadline)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _call(self, op: str, deadline: float, start: Callable[..., Any], *arguments: Any) -> None:
        self._seq += 1
        self._check()
        self._set_timeout(deadline - time.monotonic())
        try:
            self._calls.run(_issue, start, *arguments)
        except RuntimeError as error:
            self._raise(op, error)

    def _raise(self, op: str, error: RuntimeError) -> NoReturn:
        """Raise what a failure of torch's group means; the failure itself if it is this process's (out of memory)."""
        of_nccl = isinstance(error, dist.DistError) or str(error).startswith("NCCL")
        if isinstance(error, HoldfastError) or (self._error is None and not of_nccl):
            raise error
        raise self._explain(op, error) from error

    def _set_timeout(self, seconds: float) -> None:
        """Set the timeout of the next op. torch checks only the timeout of the group, not those of op options."""
        limit = _allowed(seconds)
        if limit != self._limit:
            set_timeout(self._group, limit)
            self._limit = limit

    def _explain(self, op: str, error: RuntimeError) -> HoldfastError:
        """Translate a failure of torch's group: this rank's abort, a peer's end, a timeout, or an error of NCCL."""
        POLL.reaches(lambda: self._error is not None, time.monotonic() + _GRACE_SECONDS)
        if self._error is not None:
            return self._error.again()
        return self._reason_of_another() or PeerFailed((), f"{op} (op {self._seq}): {str(error).splitlines()[0]}")

    def _own_failure(self) -> HoldfastError | None:
        state = getattr(self._group, "get_error", None)
        try:
            kind = "SUCCESS" if state is None or self._ended else state().name
        except RuntimeError as error:
            return PeerFailed((), f"torch cannot report the state of its group: {str(error).splitlines()[0]}")
        if kind == "SUCCESS":
            return None
        if kind == "TIMEOUT":
            return OpTimeout("collective", self._seq, 0.0)
        lost = PeerFailed((), f"NCCL reports {kind.lower().replace('_', ' ')}: a connection or a peer is lost")
        return self._reason_of_another() or lost

    def _end_group(self) -> None:
        """Begin the end of the group, and return: NCCL takes half a second for it."""
        if not self._ended:
            group = self._group

            def end() -> None:
                set_timeout(group, _ABORT_SECONDS)
                group.abort()

            ends.begin(end, _ABORT_SECONDS, (self._side, self._flag))  # the device uses these until then
            self._ended = True

    def _release_group(self) -> None:
        """Leave together with the others, so that NCCL sends what is left; or without them, if they take too long."""
        self._calls.close()
        left, self._group = [self._group], None
        if not self._ended:
            self._ended = True
            if failure_of_end(self._close_seconds, "shutdown", left[0].shutdown) is not None:
                self._leave_reason("it closed its communicator, and the others did not")
                failure_of_end(_ABORT_SECONDS, "abort", left[0].abort)
            self._side.release()
        failure_of_end(_ABORT_SECONDS, "release", left.clear)

    # -- ops that torch's group takes as they are

    def function(self, plan: OpPlan) -> Callable[..., None]:
        name, kind, fields = self._straight(plan)
        if kind is None:
            return super().function(plan)
        seconds, limit, single = plan.timeout, _allowed(plan.timeout), plan.op in _OF_ONE_TENSOR
        given = options(kind, within(seconds), asyncOp=False, **fields)

        def start(*arguments: Any) -> Any:
            self._seq += 1
            if self._error is not None:
                raise self._error.again()
            if self._limit != limit:
                self._set_timeout(seconds)
            queue = getattr(self._group, name)  # no reference is kept: the end of the group must not wait for this plan
            if this_thread.left_open:
                queue = partial(self._calls.run, queue)
            if single:
                return queue([arguments[0]], given)
            return queue(arguments[0], arguments[1], given)

        def finish_late(work: Any, error: RuntimeError | None, *arguments: Any) -> None:
            if error is not None:
                self._raise(plan.op, error)

        return OpCall(start, methodcaller("wait"), finish_late)

    def _straight(self, plan: OpPlan) -> tuple[str, Any, dict[str, Any]]:
        """The call of torch's group for an op, its options' type and their fields; no type if it needs more."""
        if not plan.nbytes or plan.dtype not in PLAIN:
            return "", None, {}
        if plan.reduction is not None:
            on_device = device_reduction_of(plan.dtype, plan.reduction)
            if on_device is None or not on_device.straight:
                return "", None, {}
            reduction = {"reduceOp": _native(on_device.native)}
            if plan.op == "all_reduce":
                return "allreduce", dist.AllreduceOptions, reduction
            return "_reduce_scatter_base", dist.ReduceScatterOptions, reduction
        if plan.op == "broadcast":
            return "broadcast", dist.BroadcastOptions, {"rootRank": plan.root, "rootTensor": 0}
        if plan.op == "all_gather":
            return "_allgather_base", AllgatherOptions, {}
        return "", None, {}

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        plan = device_reduction_of(tensor.dtype, op)
        if tensor.numel() == 0:
            return
        if plan is None:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            self.all_gather(parts, tensor, deadline)
            combine(parts, op, tensor)
            return
        given = plan.given(tensor)
        limit = options(dist.AllreduceOptions, until(deadline), reduceOp=_native(plan.native), asyncOp=False)
        self._call("all_reduce", deadline, self._group.allreduce, [given], limit)
        plan.finish(given, tensor, self.size)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        plan = device_reduction_of(tensor.dtype, op)
        if tensor.numel() == 0:
            return
        if plan is None:
            parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == dst else None
            self.gather(tensor, parts, dst, deadline)
            if parts is not None:
                combine(parts, op, tensor)
            return
        given = plan.given(tensor)
        limit = options(dist.ReduceOptions, until(deadline), reduceOp=_native(plan.native), rootRank=dst, asyncOp=False)
        self._call("reduce", deadline, self._group.reduce, [given], limit)
        if self.rank == dst:
            plan.finish(given, tensor, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        plan = device_reduction_of(output.dtype, op)
        if plan is None:
            parts = [torch.empty_like(output) for _ in range(self.size)]
            self._exchange("reduce_scatter", parts, inputs, deadline)
            if output.numel():
                combine(parts, op, output)
            return
        if len({each.numel() for each in inputs}) > 1:
            self._reduce_each(output, inputs, op, deadline)
            return
        if output.numel() == 0:
            return
        whole = plan.given(_joined(inputs)).reshape(-1)
        straight = whole.dtype == output.dtype
        part = output.view(-1) if straight else whole.new_empty(whole.numel() // self.size)
        limit = options(dist.ReduceScatterOptions, until(deadline), reduceOp=_native(plan.native), asyncOp=False)
        self._call("reduce_scatter", deadline, self._group._reduce_scatter_base, part, whole, limit)
        plan.finish(part.view(-1, 2) if output.dtype.is_complex else part, output.view(-1), self.size)

    def _reduce_each(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        """Reduce parts of different sizes: one reduction for each rank."""
        for rank, given in enumerate(inputs):
            part = given.clone()
            self.reduce(part, rank, op, deadline)
            if rank == self.rank:
                output.view(-1).copy_(part.view(-1))

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        if tensor.numel():
            limit = options(dist.BroadcastOptions, until(deadline), rootRank=src, rootTensor=0, asyncOp=False)
            self._call("broadcast", deadline, self._group.broadcast, [bytes_of(tensor)], limit)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        of = self._all_gather_of_host if tensor.device.type == "cpu" else self._all_gather_of_device
        of(outputs, tensor, deadline)

    def _all_gather_of_device(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if len({output.nbytes for output in outputs}) > 1:
            self._exchange("all_gather", outputs, [tensor] * self.size, deadline)
            return
        if tensor.numel() == 0:
            return
        limit = options(AllgatherOptions, until(deadline), asyncOp=False)
        whole = _adjacent(outputs)
        if whole is not None:
            self._call("all_gather", deadline, self._group._allgather_base, whole, bytes_of(tensor), limit)
        else:
            taken = [[bytes_of(output) for output in outputs]]
            self._call("all_gather", deadline, self._group.allgather, taken, [bytes_of(tensor)], limit)

    def _all_gather_of_host(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        """Gather host memory for the agreement checks: through the device, waiting for it."""
        taken = [output.to(self._device) for output in outputs]
        self._all_gather_of_device(taken, tensor.to(self._device), deadline)
        self._wait("all_gather", deadline)
        for output, there in zip(outputs, taken, strict=True):
            output.copy_(there)

    def _exchange(self, op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        """Send `inputs[j]` to rank j, on every rank: a group of NCCL's sends and receives, without empty ones."""
        limit = options(dist.AllToAllOptions, until(deadline), asyncOp=False)
        taken, given = [bytes_of(each) for each in outputs], [bytes_of(each) for each in inputs]
        self._call(op, deadline, marks_open_group(self._group.alltoall), taken, given, limit)

    def barrier(self, deadline: float) -> None:
        """Wait for the device, as torch's own barrier does: a barrier is about the host."""
        limit = options(dist.AllreduceOptions, until(deadline), reduceOp=dist.ReduceOp.MAX, asyncOp=False)
        self._call("barrier", deadline, self._group.allreduce, [self._flag], limit)
        self._wait("barrier", deadline)

    def _passed(self) -> Any:
        """An event after all ops that were queued."""
        return passed(self._device)

    def _wait(self, op: str, deadline: float) -> None:
        began = time.monotonic()
        if not wait_for(self._passed(), deadline, self._check):
            raise OpTimeout(op, self._seq, time.monotonic() - began)
        self._check()

    # -- point to point: always as a group, so that all of it goes over the one communicator

    def send(self, tensor: Tensor, dst: int, tag: int, deadline: float) -> None:
        self.batch_send_recv([(tensor, dst, tag)], [], deadline)

    def recv(self, tensor: Tensor, src: int, tag: int, deadline: float) -> None:
        self.batch_send_recv([], [(tensor, src, tag)], deadline)

    def batch_send_recv(
        self,
        sends: Sequence[tuple[Tensor, int, int]],
        recvs: Sequence[tuple[Tensor, int, int]],
        deadline: float,
    ) -> None:
        """Match messages between two ranks in the order issued: NCCL has no tags."""
        sends = [each for each in sends if each[0].numel()]
        recvs = [each for each in recvs if each[0].numel()]
        if not sends and not recvs:
            return

        def ops() -> None:
            for tensor, dst, tag in sends:
                self._group.send([bytes_of(tensor)], dst, tag)
            for tensor, src, tag in recvs:
                self._group.recv([bytes_of(tensor)], src, tag)

        self._call("batch_send_recv", deadline, run_as_group, self._group, ops)


def _allowed(seconds: float) -> float:
    """The timeout that an op gets: whole steps of torch's watchdog, so that it seldom changes."""
    steps = math.ceil(min(max(seconds, 0.0), LONGEST_SECONDS) / _TIMEOUT_STEP)
    return max(steps, 1) * _TIMEOUT_STEP


def _issue(start: Callable[..., Any], *arguments: Any) -> None:
    work = start(*arguments)
    if work is not None:
        work.wait()


def _native(op: ReduceOp) -> Any:
    if op.name == "premul_sum":
        from torch._C._distributed_c10d import _make_nccl_premul_sum

        return _make_nccl_premul_sum(op.factor)
    return _NATIVE_OPS[op.name]


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return equal, adjacent parts of one storage as one tensor of bytes; None if they are not adjacent."""
    first, step = parts[0], parts[0].nbytes
    storage = first.untyped_storage().data_ptr()
    for place, part in enumerate(parts):
        if part.data_ptr() != first.data_ptr() + place * step or part.untyped_storage().data_ptr() != storage:
            return None
    return bytes_of(first.as_strided((len(parts) * first.numel(),), (1,)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Equal parts as one tensor: a view where they lie one behind the other."""
    whole = _adjacent(parts)
    return torch.cat([part.view(-1) for part in parts]) if whole is None else whole.view(parts[0].dtype)


def count_gpus() -> int:
    """The number of GPUs that torch sees, found without initialising CUDA in this process.

    A process that has initialised CUDA cannot use it in a forked child. So if the driver's library does not tell, a
    child process is asked.
    """
    if not _cuda._is_compiled():
        return 0
    if not _cuda.is_initialized():
        listed = int(_cuda._device_count_amdsmi() if torch.version.hip else _cuda._device_count_nvml())
        if listed < 0:
            return _asked_in_a_child(tuple(os.environ.get(name, "") for name in _VISIBLE))
    return int(_cuda.device_count())


@functools.lru_cache(maxsize=1)
def _asked_in_a_child(visible: tuple[str, ...]) -> int:
    asking = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        answer = subprocess.run(asking, capture_output=True, text=True, timeout=_ASKING_SECONDS, check=True).stdout
        return int(answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def own_device(context: Context) -> torch.device:
    """Choose the GPU of this rank.

    That is the named one, else the current one, LOCAL_RANK's, or the one at the rank's place among the ranks of its
    host. Raises ValueError if the GPU does not exist: with all ranks on the first one, NCCL would refuse them or be
    slow.
    """
    there, index = count_gpus(), context.device.index
    if index is not None:
        if index >= there:
            raise ValueError(f"device={str(context.device)!r}, but torch sees {there} GPUs here")
        return context.device
    if there == 1:
        return torch.device("cuda", 0)
    if _cuda.is_initialized() and (current := _cuda.current_device()) != 0:
        return torch.device("cuda", current)
    host = context.peers[context.rank].host
    place = sum(peer.host == host for peer in context.peers[: context.rank])
    said = os.environ.get("LOCAL_RANK", "")
    for number in (int(said) if said.isdecimal() else place, place):
        if number < there:
            return torch.device("cuda", number)
    raise ValueError(
        f"device='cuda' does not say which GPU rank {context.rank} uses: it is number {place} of its host"
        f"{f', LOCAL_RANK={said}' if said else ''}, and torch sees {there} GPUs; pass device='cuda:<number>', or call "
        "torch.cuda.set_device() first"
    )


def probe(library: str) -> Available | Unavailable:
    """Whether this torch was built with `library` (nccl or rccl), and sees a GPU."""
    hip = getattr(torch.version, "hip", None)
    hint = {
        "nccl": "install a CUDA build of torch on a machine with an NVIDIA GPU",
        "rccl": "install a ROCm build of torch on a machine with an AMD GPU",
    }[library]
    if library == "nccl" and hip:
        return Unavailable("this torch is built for ROCm", "use rccl")
    if library == "rccl" and not hip:
        return Unavailable("this torch is not built for ROCm", hint)
    if not dist.is_available() or not dist.is_nccl_available():
        return Unavailable(f"this torch ({torch.__version__}) was built without {library.upper()}", hint)
    gpus = count_gpus()
    if gpus == 0:
        maker, variable = ("AMD", "HIP_VISIBLE_DEVICES") if hip else ("NVIDIA", "CUDA_VISIBLE_DEVICES")
        return Unavailable("torch sees no GPU", f"it needs an {maker} GPU: check the driver, and {variable}")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    blind = "" if finds_failures() else "; this torch does not say when an op timed out or a connection broke"
    group = "" if (kind := kind_of_group()) == LEGACY else f" ({kind})"
    return Available(
        f"torch {torch.__version__}{group}, {library.upper()} {version}, {gpus} GPU{'s' * (gpus > 1)}{blind}"
    )


def finds_failures() -> bool:
    """Whether torch's group reports that its watchdog has found a timeout, or a broken connection."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    return kind is None or hasattr(kind, "get_error")


def connect_over(context: Context, library: str) -> NcclTransport:
    """Make the group and connect all its ranks; collective over all ranks of the context."""
    if context.device.type != "cuda":
        raise Unsupported(f"{library} on {context.device}", "pass device='cuda', or use shm or gloo for CPU tensors")
    ends.check()
    return connected(NcclTransport(context, library), context, library)


def connected(transport: NcclTransport, context: Context, name: str) -> NcclTransport:
    """Connect a transport to all its ranks, once they are there; if that fails, end it, and raise."""
    try:
        wait_for_ranks(context, transport._liveness, f"{name}/")
        transport.connect_ranks(context.deadline, context.over)
    except BaseException as error:
        transport.abort(error if isinstance(error, HoldfastError) else HoldfastError(f"connecting failed: {error!r}"))
        transport.close()
        raise
    return transport


def backend(library: str, gpus: str, priority: int) -> BackendInfo:
    """What the plugin announces: the library moves anything as bytes, and reduces what `device_reduction` converts."""
    return BackendInfo(
        name=library,
        api=API_VERSION,
        description=f"torch's own group over {library.upper()}, between {gpus} GPUs; no windows, no symmetric memory",
        capabilities=Capabilities(
            reduces={"cuda": names((*REDUCIBLE, *EIGHT_BIT_FLOATS))},
            moves={"cuda": names(DTYPES)},
            finds_failures=finds_failures(),
        ),
        probe=partial(probe, library),
        connect=partial(connect_over, library=library),
        auto={"cuda": priority},
        hints=HINTS,
    )


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [backend("nccl", "NVIDIA", 100)]
