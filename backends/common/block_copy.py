"""Regions, checks and block-wise copies that the memory planes share.

A copy goes block by block, so a deadline, a closed plane and a closed region are noticed within a fraction of a
millisecond. It runs in the calling thread, with further threads where torch too would use several; the returned work is
complete.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
import xxhash

from holdfast.backends.common.process_memory import HUGE_PAGE
from holdfast.comms.errors import CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.system import forks
from holdfast.comms.tensors.exposed import ExposedMemory, moved_error
from holdfast.comms.tensors.memory import plain_tensor
from holdfast.comms.work import Work

BLOCK_BYTES = 2 << 20
"""Bytes between two checks of deadline and generation: 0.2 ms at memory speed, so the checks cost nothing."""

SHARE_BYTES = 8 << 20
"""The least bytes of a large read for each thread that shares it: a thread costs 0.1 ms."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Bytes to copy from a region to the memory at `address`, or the other way if `writing`.

    `look()` raises if the plane was closed or the time is over.
    """

    handle: Handle
    address: int
    offset: int
    nbytes: int
    deadline: float
    writing: bool
    look: Callable[[], None]

    def part(self, start: int, nbytes: int) -> BlockCopy:
        """The copy of `nbytes` of the bytes, from number `start` on."""
        if nbytes == self.nbytes:
            return self
        address, offset = self.address + start, self.offset + start
        return BlockCopy(self.handle, address, offset, nbytes, self.deadline, self.writing, self.look)

    def blocks(self, most: int) -> Iterator[BlockCopy]:
        """The copies of its blocks, of at most so many bytes; one if it has no bytes."""
        for start in range(0, self.nbytes, most) or (0,):
            yield self.part(start, min(most, self.nbytes - start))


class RegionAccess(ABC):
    """Access to the region of another process, for the duration of one read or write."""

    nbytes: int

    @abstractmethod
    def pull(self, address: int, offset: int, nbytes: int) -> None:
        """Copy one block of the region to `address`. Raises `RegionGone` if what arrived must not be used."""

    @abstractmethod
    def push(self, address: int, offset: int, nbytes: int) -> None:
        """Copy one block at `address` into the region. Raises `RegionGone`, without writing, if it is closed."""

    @abstractmethod
    def release(self, unharmed: bool) -> None:
        """End the access; `unharmed` if the copy ended without an error."""


class BlockCopyPlane(MemoryPlane):
    """A memory plane that checks all arguments before it moves a byte, and opens regions with `_open_region`."""

    def __init__(self) -> None:
        self._closed = False
        self._count = itertools.count(1)

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        if nbytes < HUGE_PAGE:
            return super().empty(nbytes)
        memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # the kernel has no huge pages: slower
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

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
        """Copy all of `tensor`, which lies at `address`, to or from the region of a handle."""
        self._check_open()
        began, seq, nbytes = time.monotonic(), next(self._count), tensor.nbytes
        offset = integer(offset, "offset")
        self._check(op, handle, offset, nbytes)
        self._check_apart(op, handle, address, offset, nbytes)
        deadline = began + seconds(timeout)

        def look() -> None:
            self._check_open()
            if time.monotonic() > deadline:
                raise OpTimeout(op, seq, time.monotonic() - began)

        def body() -> None:
            self._in_blocks(BlockCopy(handle, address, offset, nbytes, deadline, writing, look))
            if not writing and nbytes and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

        work = Work(op)
        work.run(body)
        return work

    @abstractmethod
    def _open_region(self, handle: Handle, writing: bool) -> RegionAccess:
        """Open the region of a handle of this plane. Raises `RegionGone`, `CorruptData`, `Unsupported`."""

    def _in_blocks(self, copy: BlockCopy) -> None:
        """Copy block by block; `copy.look()` is called before each."""
        threads = 1 if copy.writing else thread_count(copy.nbytes)
        run_in_threads(copy.nbytes, threads, lambda _, at, nbytes: self._copy_share(copy.part(at, nbytes)))

    def _copy_share(self, copy: BlockCopy) -> None:
        region = self._open_region(copy.handle, copy.writing)
        unharmed = False
        try:
            check_size(copy.handle, region.nbytes)
            move = region.push if copy.writing else region.pull
            for block in copy.blocks(BLOCK_BYTES):
                copy.look()
                move(block.address, block.offset, block.nbytes)
            unharmed = True
        finally:
            region.release(unharmed)

    def _check(self, op: str, handle: Handle, offset: int, nbytes: int) -> None:
        """Raise ValueError or `Unsupported` unless these bytes are within a region of this kind of plane."""
        if offset < 0 or offset + nbytes > handle.nbytes:
            raise ValueError(f"{op} of {nbytes} bytes at byte {offset} is outside the region of {handle.nbytes} bytes")
        if handle.plane != self.name:
            raise Unsupported(
                f"a handle of memory plane {handle.plane!r} on plane {self.name!r}",
                f"open it with comms.memory({handle.plane!r})",
            )

    def _check_apart(self, op: str, handle: Handle, address: int, offset: int, nbytes: int) -> None:
        """Raise ValueError if a block of the copy would overwrite what a later block reads."""
        own = _own.get((os.getpid(), handle.plane, handle.address))
        if own is not None and own.open and 0 < abs(own.memory.address + offset - address) < nbytes:
            raise ValueError(
                f"{op}: the tensor overlaps the bytes of the region, which lies in this process; copy first"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise RegionGone(f"this {self.name} memory plane was closed; open another with comms.memory()")


class HeldRegion(Region):
    """A region that keeps its memory alive, and detects that its tensor has moved."""

    def __init__(self, handle: Handle, memory: ExposedMemory) -> None:
        self.open = True
        self._handle, self.memory = handle, memory
        _own[os.getpid(), handle.plane, handle.address] = self
        forks.refuse_in_children(self, "a region of exposed memory", ("handle", "open"))

    @property
    def handle(self) -> Handle:  # type: ignore[override]
        """Raises `RegionGone`, and closes the region, if its tensor has other memory now."""
        self.check()
        return self._handle

    def check(self) -> None:
        """Raise like `handle`; does nothing once the region is closed."""
        if self.open and self.memory.moved:
            self.close()
            raise moved_error("a region")


_own: weakref.WeakValueDictionary[tuple[int, str, bytes], HeldRegion] = weakref.WeakValueDictionary()
"""The regions of this process, by its id, plane and address."""


class HeldUntil:
    """Hold a lock, which another copy may hold for long; `copy.look` raises if it is not free by the deadline.

    A class, since it is entered for each block.
    """

    __slots__ = ("_copy", "_lock")

    def __init__(self, lock: threading.RLock, copy: BlockCopy) -> None:
        self._lock, self._copy = lock, copy

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=max(self._copy.deadline - time.monotonic(), 0.001)):
            self._copy.look()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def check_size(handle: Handle, nbytes: int) -> None:
    """Raise `CorruptData` unless a handle has the size of its region."""
    if handle.nbytes != nbytes:
        raise forged(f"it names {handle.nbytes} bytes, and its region has {nbytes}")


def sealed(body: bytes) -> bytes:
    """An address with its checksum, for a library that would trust any bytes."""
    return xxhash.xxh3_64_digest(body) + body


def unsealed(data: bytes) -> bytes:
    """What `sealed` got. Raises `CorruptData` for anything else."""
    if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
        raise forged("the checksum of its address is wrong")
    return data[8:]


def forged(why: object) -> CorruptData:
    """The error of a handle that no owner of a region can have made."""
    return CorruptData(f"the handle of a region is forged or damaged: {why}; ask the owner for it again")


def thread_count(nbytes: int) -> int:
    """The number of threads that share a large read: as many as torch would use."""
    return max(1, min(torch.get_num_threads(), nbytes // SHARE_BYTES))


def run_in_threads(nbytes: int, count: int, copy: Callable[[int, int, int], None]) -> None:
    """Run `copy(number, start, nbytes)` for `count` pieces, the first in this thread, each other in its own.

    Returns or raises only after all of them have ended.
    """
    if count == 1:
        copy(0, 0, nbytes)
        return
    share = -(-nbytes // count)
    with ThreadPoolExecutor(count - 1, "holdfast-read") as pool:
        others = [
            pool.submit(copy, number, number * share, min(share, nbytes - number * share)) for number in range(1, count)
        ]
        copy(0, 0, share)
    for other in others:
        other.result()


def contiguous_address(tensor: torch.Tensor, what: str, plane: str) -> int:
    """The address of a tensor.

    Raises TypeError, ValueError or `Unsupported` unless it is contiguous CPU memory of its own.
    """
    flat = plain_tensor(tensor, what)
    if flat.device.type != "cpu":
        raise Unsupported(f"{what} on {flat.device.type} over memory plane {plane!r}", "copy it to the CPU")
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        raise ValueError(f"{what} must be contiguous and resolved: call .contiguous() (or resolve_conj) first")
    return flat.data_ptr()
