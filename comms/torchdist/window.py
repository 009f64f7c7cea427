"""`GroupWindow`: torch 2.14's window of a process group (`dist._new_window`) over `comms.Window`, on every transport.

torch's class has no constructor in Python, so this one has its methods, and `get`, `flush` and `close` beside them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import Unsupported
from holdfast.comms.onesided.window import Window, WindowInfo
from holdfast.comms.torchdist.calls import seconds
from holdfast.comms.torchdist.works import TorchWork
from holdfast.comms.work import Work

Tensor = torch.Tensor

c10d: Any = _distributed_c10d
"""torch's types of windows are not in the stubs of torch before 2.14."""


class GroupWindow:
    """A window of a group. Offsets count elements; `timeout` of the options bounds a call, else the group's timeout.

    As in torch's NCCL backend, a `put` signals its target once the data is there: one `wait_signal` there takes it.
    `Window.put` of holdfast's own windows (`group.communicator.window`) does not signal.
    """

    def __init__(self, communicator: Communicator, timeout: float, tensor: Tensor | None = None) -> None:
        self._timeout = timeout
        self._window: Window = communicator.window(None, timeout)
        if tensor is not None:
            self._window.register(tensor, timeout)

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Expose `tensor` to all ranks, and access theirs; collective.

        Its memory is kept until `tensor_deregister`, also if the window is not the owner.
        """
        self._window.register(tensor, self._timeout)

    def tensor_deregister(self) -> None:
        """Stop exposing the tensor; collective."""
        self._window.deregister(self._timeout)

    def put(
        self, tensor: Tensor, dst_rank: int, target_offset_nelems: int, async_op: bool = False, opts: Any = None
    ) -> dist.Work:
        """Copy `tensor` into the window of `dst_rank`, from an element on, and signal that rank."""
        limit = self._limit(opts)
        put = self._window.put(tensor, dst_rank, target_offset_nelems, limit, async_op=async_op)
        return self._work([put, self._window.signal(dst_rank, limit, async_op=async_op)], limit)

    def get(
        self, tensor: Tensor, src_rank: int, source_offset_nelems: int, async_op: bool = False, opts: Any = None
    ) -> dist.Work:
        """Fill `tensor` from the window of `src_rank`, from an element on. torch has no such call."""
        limit = self._limit(opts)
        work = self._window.get(tensor, src_rank, source_offset_nelems, limit, async_op=async_op)
        return self._work([work], limit)

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> dist.Work:
        """Send a rank one signal."""
        limit = self._limit(opts)
        return self._work([self._window.signal(peer_rank, limit, async_op=async_op)], limit)

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> dist.Work:
        """Wait for one signal of a rank, and consume it."""
        limit = self._limit(opts)
        return self._work([self._window.wait_signal(peer_rank, limit, async_op=async_op)], limit)

    def flush(self, rank: int | None = None) -> None:
        """Return when all puts to a rank (None: to all ranks) have taken effect there. torch has no such call."""
        self._window.flush(rank, self._timeout)

    def map_remote_tensor(self, rank: int) -> Tensor:
        """A rank's tensor itself, for loads and stores. Raises `Unsupported` where memory is reached by messages."""
        return self._window.map(rank)

    def get_attr(self, peer_rank: int) -> Any:
        """torch's `WindowAttr`: UNIFIED where loads and stores reach the memory of a rank, else SEPARATE."""
        if not hasattr(c10d, "WindowAttr"):
            raise Unsupported(f"get_attr on torch {torch.__version__}", "it takes torch 2.14; `info` says the same")
        attributes = c10d.WindowAttr()
        kind = c10d.WindowAccessType
        attributes.access_type = kind.UNIFIED if self.info.access == "mapped" else kind.SEPARATE
        return attributes

    @property
    def info(self) -> WindowInfo:
        """What the window exposes, as `Window.info`."""
        return self._window.info

    def close(self) -> None:
        """Close this rank's part. Idempotent; the end of the group closes its windows too."""
        self._window.close()

    def _limit(self, opts: Any) -> float:
        return (seconds(opts.timeout) if opts is not None else None) or self._timeout

    def _work(self, works: list[Work], limit: float) -> TorchWork:
        return TorchWork(works, [], limit, 0)
