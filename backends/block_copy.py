"""What the memory planes of one host have in common: checking tensors and ranges, and copying in blocks.

A copy goes block by block, so that a deadline, a closed plane and a closed region are noticed within a
fraction of a millisecond. It is done in the calling thread: the work that comes back is complete.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod

import torch

from holdfast.comms.errors import CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.plane import Handle, MemoryPlane
from holdfast.comms.work import Work

BLOCK_BYTES = 2 << 20
"""Bytes between two looks at deadline and generation: large enough to cost nothing, 0.2 ms at memory speed.
"""


class Reach(ABC):
    """A hold on a region of somebody, for the time of one read or write."""

    nbytes: int

    @abstractmethod
    def pull(self, address: int, offset: int, nbytes: int) -> None:
        """Copy one block of the region to `address`. Raises `RegionGone` if what arrived must not be used."""

    @abstractmethod
    def push(self, address: int, offset: int, nbytes: int) -> None:
        """Copy one block at `address` into the region. Raises `RegionGone`, with nothing written, if it is
        closed.
        """

    @abstractmethod
    def release(self, unharmed: bool) -> None:
        """The copy is over; `unharmed` if it ended without an error."""


class BlockCopyPlane(MemoryPlane):
    """A memory plane that reaches memory through `_reach`."""

    def __init__(self) -> None:
        self._closed = False
        self._count = itertools.count(1)

    @abstractmethod
    def _reach(self, handle: Handle, writing: bool) -> Reach:
        """Find the region of a handle of this plane. Raises `RegionGone`, `CorruptData`, `Unsupported`."""

    def read(self, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        address = contiguous_address(into, "into", self.name)
        return self._copy("memory read", handle, address, into, offset, timeout, writing=False)

    def write(self, handle: Handle, source: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        address = contiguous_address(source, "source", self.name)
        return self._copy("memory write", handle, address, source, offset, timeout, writing=True)

    def _copy(
        self,
        op: str,
        handle: Handle,
        address: int,
        tensor: torch.Tensor,
        offset: int,
        timeout: float,
        writing: bool,
    ) -> Work:
        self._check_open()
        began, seq, nbytes = time.monotonic(), next(self._count), tensor.nbytes
        if offset < 0 or offset + nbytes > handle.nbytes:
            raise ValueError(f"{op} of {nbytes} bytes at byte {offset} is outside the region of {handle.nbytes} bytes")
        if handle.plane != self.name:
            raise Unsupported(f"a handle of plane {handle.plane!r} on plane {self.name!r}", "open that plane")

        def body() -> None:
            region = self._reach(handle, writing)
            unharmed = False
            try:
                if region.nbytes != handle.nbytes:
                    raise CorruptData(
                        f"a handle of {handle.nbytes} bytes for a region of {region.nbytes}: a forged handle"
                    )
                move = region.push if writing else region.pull
                for start in range(0, nbytes, BLOCK_BYTES) or (0,):
                    if time.monotonic() - began > timeout:
                        raise OpTimeout(op, seq, time.monotonic() - began)
                    self._check_open()
                    move(address + start, offset + start, min(BLOCK_BYTES, nbytes - start))
                unharmed = True
            finally:
                region.release(unharmed)
            if not writing and nbytes and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

        work = Work(op)
        work.run(body)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise RegionGone(f"this {self.name} memory plane was closed; open another with comms.memory()")


def contiguous_address(tensor: torch.Tensor, what: str, plane: str) -> int:
    """Where a tensor's bytes lie. Raises TypeError, ValueError or `Unsupported` for one that is not plain
    memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = f"{tensor.layout} tensors on {tensor.device.type}"
        raise Unsupported(f"{kind} on memory plane {plane!r}", "copy to a dense tensor on the CPU")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"{type(tensor).__name__} on memory plane {plane!r}", "give its local, plain tensor")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{what} must be contiguous and resolved: call .contiguous() (or resolve_conj) first")
    return tensor.data_ptr()
