"""`nccl`: torch's own ProcessGroupNCCL, for tensors of NVIDIA GPUs. `rccl` is the same over AMD's library.

Ops have torch's stream semantics: a synchronous op is in order on the current stream when it returns, an asynchronous
one runs beside it, and neither waits for the device, so CUDA graphs can hold them. A hung op ends by `abort` from any
thread, and so by a peer's death, which a watcher learns from the kernel, and by its timeout, which torch's watchdog
notices. What failed is raised by the next op, or by whoever waits. Barriers and objects wait for the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.backends.device_reduction import carried, combine
from holdfast.backends.streams import SideStream, passed, until, wait_for
from holdfast.backends.torch_group import TorchGroup, bytes_of, options
from holdfast.comms.algorithms.arithmetic import EIGHT_BIT_FLOATS, REDUCIBLE
from holdfast.comms.errors import HoldfastError, OpTimeout, PeerFailed, Unsupported
from holdfast.comms.ops import ReduceOp
from holdfast.comms.plugins import API_VERSION, Available, BackendInfo, Capabilities, Unavailable, hookimpl
from holdfast.comms.tensors import DTYPES, names
from holdfast.comms.transport import Context
from holdfast.comms.work import Work

Tensor = torch.Tensor

_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
"""torch's watchdog ends a group whose op timed out, and not the process, which is its default."""

_LOOK_SECONDS = 0.05
"""How often to ask torch whether its watchdog has ended the group."""

_GRACE_SECONDS = 0.2
_making = threading.Lock()


class NcclTransport(TorchGroup):
    """A ProcessGroupNCCL, with an end."""

    streams: ClassVar[bool] = True
    _look_seconds = _LOOK_SECONDS

    def __init__(self, context: Context, name: str) -> None:
        super().__init__(context)
        index = context.device.index
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._ended = False
        try:
            self._group = make_group(context)
        except BaseException:
            self._forget_peers()
            raise
        self._watch_peers(name)
        self._side = SideStream(self._device, self._check)
        self._flag = torch.zeros(1, dtype=torch.uint8, device=self._device)

    def meet(self, deadline: float) -> None:
        """Return once every rank is connected to every other. NCCL connects with the first op."""
        with torch.cuda.device(self._device):
            self._call("connect", self._group.eager_connect_single_device, self._device)
            self.barrier(deadline)

    # -- how an op is put in order, and how it ends

    def launch(self, name: str, op: Callable[[], None]) -> Work:
        return self._side.launch(name, op)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _call(self, op: str, start: Callable[..., Any], *arguments: Any) -> None:
        self._seq += 1
        self._check()
        try:
            work = start(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._explain(op, error) from error

    def _explain(self, op: str, error: RuntimeError) -> HoldfastError:
        """What a failure of torch's group means: our own abort, a peer's end, a timeout, or NCCL's own trouble."""
        end = time.monotonic() + _GRACE_SECONDS
        while self._error is None and time.monotonic() < end:
            time.sleep(0.001)
        if self._error is not None:
            return self._error.again()
        return PeerFailed((), f"{op} (op {self._seq}): {str(error).splitlines()[0]}")

    def _own_failure(self) -> HoldfastError | None:
        state = getattr(self._group, "get_error", None)
        kind = "SUCCESS" if state is None or self._ended else state().name
        if kind == "SUCCESS":
            return None
        if kind == "TIMEOUT":
            return OpTimeout("collective", self._seq, 0.0)
        return PeerFailed((), f"NCCL reports {kind.lower().replace('_', ' ')}: a connection or a peer is lost")

    def _end_group(self) -> None:
        if not self._ended:
            self._ended = True
            self._group.abort()

    def _release_group(self) -> None:
        self._side.release()
        if not self._ended:
            self._ended = True
            self._group.shutdown()
        self._group = None

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        plan = carried(tensor.dtype, op)
        if tensor.numel() == 0:
            return
        if plan is None:
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            self.all_gather(parts, tensor, deadline)
            combine(parts, op, tensor)
            return
        given = plan.given(tensor)
        limit = options(dist.AllreduceOptions, until(deadline), reduceOp=_native(plan.native), asyncOp=False)
        self._call("all_reduce", self._group.allreduce, [given], limit)
        plan.finish(given, tensor, self.size)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        plan = carried(tensor.dtype, op)
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
        self._call("reduce", self._group.reduce, [given], limit)
        if self.rank == dst:
            plan.finish(given, tensor, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        plan = carried(output.dtype, op)
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
        self._call("reduce_scatter", self._group._reduce_scatter_base, part, whole, limit)
        plan.finish(part.view(-1, 2) if output.dtype.is_complex else part, output.view(-1), self.size)

    def _reduce_each(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        """Parts of different sizes: one reduction for each rank."""
        for rank, given in enumerate(inputs):
            part = given.clone()
            self.reduce(part, rank, op, deadline)
            if rank == self.rank:
                output.view(-1).copy_(part.view(-1))

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        if tensor.numel():
            limit = options(dist.BroadcastOptions, until(deadline), rootRank=src, rootTensor=0, asyncOp=False)
            self._call("broadcast", self._group.broadcast, [bytes_of(tensor)], limit)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        if tensor.device.type == "cpu":
            self._all_gather_of_host(outputs, tensor, deadline)
            return
        if len({output.nbytes for output in outputs}) > 1:
            self._exchange("all_gather", outputs, [tensor] * self.size, deadline)
            return
        if tensor.numel() == 0:
            return
        limit = options(AllgatherOptions, until(deadline), asyncOp=False)
        whole = _as_one(outputs)
        if whole is not None:
            self._call("all_gather", self._group._allgather_base, whole, bytes_of(tensor), limit)
        else:
            taken = [[bytes_of(output) for output in outputs]]
            self._call("all_gather", self._group.allgather, taken, [bytes_of(tensor)], limit)

    def _all_gather_of_host(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        """For the agreement checks, whose words are in host memory: through the device, waiting for it."""
        taken = [output.to(self._device) for output in outputs]
        self.all_gather(taken, tensor.to(self._device), deadline)
        self._wait("all_gather", deadline)
        for output, there in zip(outputs, taken, strict=True):
            output.copy_(there)

    def _exchange(self, op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        """Every rank's `inputs[j]` to rank j: NCCL's all-to-all is a group of sends and receives without empty ones."""
        limit = options(dist.AllToAllOptions, until(deadline), asyncOp=False)
        taken, given = [bytes_of(each) for each in outputs], [bytes_of(each) for each in inputs]
        self._call(op, self._group.alltoall, taken, given, limit)

    def barrier(self, deadline: float) -> None:
        """Waits for the device, as torch's own does: a barrier is about the host."""
        limit = options(dist.AllreduceOptions, until(deadline), reduceOp=dist.ReduceOp.MAX, asyncOp=False)
        self._call("barrier", self._group.allreduce, [self._flag], limit)
        self._wait("barrier", deadline)

    def _wait(self, op: str, deadline: float) -> None:
        began = time.monotonic()
        if not wait_for(passed(self._device), deadline, self._check):
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
        """NCCL has no tags: messages between two ranks are matched in the order issued."""
        sends = [each for each in sends if each[0].numel()]
        recvs = [each for each in recvs if each[0].numel()]
        if not sends and not recvs:
            return

        def start() -> Any:
            self._group._start_coalescing()
            for tensor, dst, tag in sends:
                self._group.send([bytes_of(tensor)], dst, tag)
            for tensor, src, tag in recvs:
                self._group.recv([bytes_of(tensor)], src, tag)
            return self._group._end_coalescing()

        self._call("batch_send_recv", start)


def make_group(context: Context) -> Any:
    """A ProcessGroupNCCL whose communicator can be aborted while it connects, and whose watchdog ends it, not us.

    What the user says by torch's own variables (TORCH_NCCL_USE_COMM_NONBLOCKING) goes before.
    """
    kind: Any = dist.ProcessGroupNCCL
    settings = kind.Options()
    settings._timeout = timedelta(seconds=max(context.deadline - time.monotonic(), 0.001))
    if "TORCH_NCCL_USE_COMM_NONBLOCKING" not in os.environ:
        settings.config.blocking = 0
    with _making:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY
        try:
            return kind(context.store, context.rank, context.size, settings)
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before


def _native(op: ReduceOp) -> Any:
    if op.name == "premul_sum":
        from torch._C._distributed_c10d import _make_nccl_premul_sum

        return _make_nccl_premul_sum(op.factor)
    return _NATIVE_OPS[op.name]


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Equal parts that lie one behind the other in one storage, as bytes; None if they do not."""
    first, step = parts[0], parts[0].nbytes
    storage = first.untyped_storage().data_ptr()
    for place, part in enumerate(parts):
        if part.data_ptr() != first.data_ptr() + place * step or part.untyped_storage().data_ptr() != storage:
            return None
    return bytes_of(first.as_strided((len(parts) * first.numel(),), (1,)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Equal parts as one tensor: a view where they lie one behind the other."""
    whole = _as_one(parts)
    return torch.cat([part.view(-1) for part in parts]) if whole is None else whole.view(parts[0].dtype)


def probe_torch(library: str) -> Available | Unavailable:
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
    if not torch.cuda.is_available():
        return Unavailable("torch sees no GPU", "check the driver, and CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Available(f"torch {torch.__version__}, {library.upper()} {version}, {torch.cuda.get_device_name()}")


def connect_over(context: Context, library: str) -> NcclTransport:
    """Make the group and connect all its ranks; collective over all ranks of the context."""
    if context.device.type != "cuda":
        raise Unsupported(f"{library} on {context.device}", "pass device='cuda', or use shm or gloo for CPU tensors")
    transport = NcclTransport(context, library)
    try:
        transport.meet(context.deadline)
    except BaseException as error:
        transport.abort(error if isinstance(error, HoldfastError) else HoldfastError(str(error)))
        transport.close()
        raise
    return transport


def capabilities() -> Capabilities:
    """Moves anything as bytes; reduces what NCCL does, and the rest carried in that (see `device_reduction`)."""
    return Capabilities(
        reduces={"cuda": names((*REDUCIBLE, *EIGHT_BIT_FLOATS))},
        moves={"cuda": names(DTYPES)},
    )


def probe() -> Available | Unavailable:
    """Whether NCCL can run here."""
    return probe_torch("nccl")


def connect(context: Context) -> NcclTransport:
    """See `connect_over`."""
    return connect_over(context, "nccl")


@hookimpl
def holdfast_backends() -> list[BackendInfo]:
    return [
        BackendInfo(
            name="nccl",
            api=API_VERSION,
            description="torch's ProcessGroupNCCL, between NVIDIA GPUs",
            capabilities=capabilities(),
            probe=probe,
            connect=connect,
        )
    ]
