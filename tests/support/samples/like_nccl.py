"""The nccl transport over torch's gloo group in NCCL's place, for machines without a GPU."""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from holdfast.backends.nccl import transport
from holdfast.backends.nccl.transport import NcclTransport
from holdfast.comms import HoldfastError
from holdfast.comms.transport.liveness import Liveness

Tensor = torch.Tensor


class LikeNccl:
    """torch's gloo group, with the few calls that only NCCL's has."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._together: list[Any] | None = None
        self.aborted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        average = options.reduceOp.op == dist.ReduceOp.AVG if hasattr(options.reduceOp, "op") else False
        if average:
            options.reduceOp = dist.ReduceOp.SUM
        self._group.allreduce(tensors, options).wait()
        if average:
            tensors[0].div_(self._group.size())

    def reduce(self, tensors: list[Tensor], options: Any) -> None:
        """gloo leaves partial sums on the ranks that are not the root."""
        total = transport.options(dist.AllreduceOptions, options.timeout, reduceOp=options.reduceOp)
        mine = tensors[0].clone()
        self.allreduce([mine], total)
        if options.rootRank == self._group.rank():
            tensors[0].copy_(mine)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> None:
        taken = torch.empty(sum(each.numel() for each in outputs), dtype=torch.uint8)
        sizes = [each.numel() for each in outputs]
        self._group.alltoall_base(taken, torch.cat(inputs), sizes, [each.numel() for each in inputs], options).wait()
        for output, part in zip(outputs, taken.split(sizes), strict=True):
            output.copy_(part)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any) -> None:
        limit = transport.options(dist.AllreduceOptions, options.timeout, reduceOp=options.reduceOp)
        self.allreduce([whole], limit)
        output.copy_(whole.view(self._group.size(), -1)[self._group.rank()])

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
        self.aborted += 1


class OnTheHost(NcclTransport):
    """The nccl transport without streams, over `LikeNccl`."""

    def __init__(self, rank: int, size: int, store: dist.Store, group: Any = None) -> None:
        self.rank, self.size, self._epoch, self._seq = rank, size, 0, 0
        self._error: HoldfastError | None = None
        self._ended = False
        self._liveness = Liveness([], rank)
        self._ending = threading.Lock()
        self._device = torch.device("cpu")
        self._side = SimpleNamespace(release=lambda: None)  # type: ignore[assignment]
        self._flag = torch.zeros(1, dtype=torch.uint8)
        self._begin(
            LikeNccl(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))) if group is None else group
        )

    def _stream_here(self) -> Any:
        return contextlib.nullcontext

    def _wait(self, op: str, deadline: float) -> None:
        self._check()

    def _forget_peers(self) -> None:
        """Does nothing: this transport watches no peers."""

    def _all_gather_of_host(self, outputs: Any, tensor: Tensor, deadline: float) -> None:
        if len({output.nbytes for output in outputs}) > 1:
            self._exchange("all_gather", outputs, [tensor] * self.size, deadline)
        elif (whole := transport._adjacent(outputs)) is not None and tensor.numel():
            self._group._allgather_base(whole, transport.bytes_of(tensor), transport.AllgatherOptions()).wait()
        elif tensor.numel():
            self._group.allgather([[transport.bytes_of(o) for o in outputs]], [transport.bytes_of(tensor)]).wait()
