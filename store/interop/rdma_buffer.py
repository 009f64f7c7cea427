"""`RDMABuffer`: memory that other processes read and write, with the calls of Monarch's class of that name.

Monarch moves bytes by ibverbs; without such hardware it falls back to TCP, through its actors. This one moves them by
the best memory plane of this host instead (`holdfast.comms.memory`): between processes of one host that is a copy from
memory to memory. It needs no Monarch, but may be an argument or a result of an actor's endpoint: it travels as the
region's handle, a few bytes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator

import torch

from holdfast.comms import Handle, MemoryPlane, Region, Unsupported, Work, memory
from holdfast.comms.system import forks

Memory = torch.Tensor | memoryview


class BufferTransfer:
    """A read, a write or a drop, which begins when it is awaited, or asked for by `get`."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def get(self) -> None:
        """Do it in this thread."""
        self._run()

    def __await__(self) -> Generator[object, None, None]:
        return asyncio.to_thread(self._run).__await__()


class RDMABuffer:
    """One-dimensional contiguous memory of this process, for all processes of the user on this host.

    The memory is exposed until `drop`, or until this object is collected. Raises ValueError for memory of another form
    or without elements, `Unsupported` for memory that the plane cannot access, `BackendUnavailable` without a plane.
    """

    def __init__(self, data: Memory) -> None:
        given = _in_bytes(data)
        if not given.numel():
            raise ValueError("an RDMABuffer needs at least one byte")
        self._region: Region | None = _plane().expose(given, writable=True)
        self._handle = self._region.handle

    def __reduce__(self) -> tuple[Callable[[bytes], RDMABuffer], tuple[bytes]]:
        return _of_another, (self._handle.encode(),)

    @property
    def backend(self) -> str:
        """The backend that moves the bytes, by its memory plane."""
        return self._handle.plane

    def size(self) -> int:
        """The size in bytes."""
        return self._handle.nbytes

    def read_into(self, dst: Memory, *, timeout: float = 60.0) -> BufferTransfer:
        """Read the whole buffer into the first bytes of `dst`; await the result, or call its `get`.

        Raises ValueError at once if `dst` is smaller. The transfer raises `RegionGone` if the buffer was dropped or its
        process died, and `OpTimeout`.
        """
        into = _in_bytes(dst)
        if into.numel() < self.size():
            raise ValueError(f"dst has {into.numel()} bytes, the buffer {self.size()}")
        return self._transfer(lambda plane: plane.read(self._handle, into[: self.size()], timeout=timeout))

    def write_from(self, src: Memory, *, timeout: float = 60.0) -> BufferTransfer:
        """Write `src` into the first bytes of the buffer; otherwise as `read_into`."""
        source = _in_bytes(src)
        if source.numel() > self.size():
            raise ValueError(f"src has {source.numel()} bytes, the buffer {self.size()}")
        return self._transfer(lambda plane: plane.write(self._handle, source, timeout=timeout))

    def drop(self) -> BufferTransfer:
        """Stop exposing the memory. Raises `Unsupported` in a process that did not make the buffer."""
        region = self._region
        if region is None:
            raise Unsupported("dropping a buffer of another process", "call drop() in the process that made it")
        return BufferTransfer(region.close)

    def _transfer(self, begin: Callable[[MemoryPlane], Work]) -> BufferTransfer:
        def run() -> None:
            begin(_plane(self._handle.plane)).wait()

        return BufferTransfer(run)


def _of_another(handle: bytes) -> RDMABuffer:
    """The buffer with this handle, in a process that did not make it."""
    buffer = RDMABuffer.__new__(RDMABuffer)
    buffer._region, buffer._handle = None, Handle.decode(handle)
    return buffer


def _in_bytes(data: Memory) -> torch.Tensor:
    if isinstance(data, memoryview):
        if data.ndim != 1 or not data.c_contiguous:
            raise ValueError("a memoryview must be one-dimensional and contiguous")
        return (
            torch.frombuffer(data, dtype=torch.uint8)
            if data.nbytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
    if data.dim() != 1 or not data.is_contiguous():
        raise ValueError(f"a tensor must be one-dimensional and contiguous, not {tuple(data.shape)}")
    return data.detach().view(torch.uint8)


@functools.cache
def _plane(name: str = "auto") -> MemoryPlane:
    """The plane of this process; open until it ends."""
    return memory(name)


forks.run_in_children(_plane.cache_clear)
