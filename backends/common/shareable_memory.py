"""Memory of this process that other processes of the host can map.

Each piece is a memfd: it has no name, so no crash leaves it behind, and it lives as long as a process maps it. Others
open it as /proc/<pid>/fd/<n>. A mapping is private, so what a process writes into it stays in that process, unless it
is made to write to regions, or to be read alone: devices are told of the pages of the file, not of copies of them.

A lasting mapping holds a shared lock on the file. The owner asks `is_lent` before it writes to memory anew, so memory
does not change under a lasting mapping, whatever the catalogue of the owner says.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from holdfast.backends.common.process_memory import HUGE_PAGE, put_on_huge_pages
from holdfast.backends.common.region_table import forged, open_memfd
from holdfast.comms.errors import RegionGone
from holdfast.comms.system.files import (
    SHAREABLE_MEMORY,
    Mapping,
    OwnedDescriptor,
    advise,
    map_pages,
    own_mapping,
    unmap_pages,
)
from holdfast.comms.system.signal_safety import shared_lock
from holdfast.comms.transport.base import Peer

SHARE_BYTES = 8 << 20
"""The least bytes of a large read for each thread that shares it: a thread costs 0.1 ms."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Since Linux 5.14; before that the first access is slower."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE = 0
_SLOWEST_MOVE = 1e9
"""Bytes a second. Where the kernel makes huge pages more slowly than it gives small ones, the rest comes on those."""
_MOVE_SLACK = 0.02
"""Seconds by which huge pages may be later: a thread that waits for a processor says nothing of the kernel."""

MOST_MAPPED = 256
"""The number of mappings that are kept for further reads: of each publisher of a mesh, all memory that it reuses."""

_lock = shared_lock()
_descriptors: dict[tuple[int, int], OwnedDescriptor] = {}
"""The memfd of each shareable memory, by process and address of the storage."""


def allocate_shareable(nbytes: int, look: Callable[[], None]) -> torch.Tensor:
    """A uint8 tensor of `nbytes` that other processes can map. Its pages are there: to write to them is fast.

    As many threads touch them as torch would use. They lie on huge pages as far as the kernel makes these at once.
    `look` is called every few milliseconds; if it raises, the memory is let go.
    """
    size = max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
    descriptor = os.memfd_create(SHAREABLE_MEMORY, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = _map(descriptor, 0, size, mmap.MAP_SHARED)
        address = ctypes.addressof(memory)

        def touch(first_piece: int, pieces: int) -> None:
            late = 0.0
            for number in range(first_piece, first_piece + pieces):
                look()
                at = number * SHARE_BYTES
                piece = min(SHARE_BYTES, size - at)
                if late < _MOVE_SLACK:
                    began = time.monotonic()
                    for first in range(at, at + piece - HUGE_PAGE + 1, HUGE_PAGE):
                        memory[first] = 0  # a huge page comes only where a page is
                    put_on_huge_pages(address + at, piece)
                    late += time.monotonic() - began - piece / _SLOWEST_MOVE
                os.posix_fallocate(descriptor, at, piece)  # the rest: faster than to touch page by page
                advise(address + at, piece, _POPULATE_WRITE)

        run_in_threads(-(-size // SHARE_BYTES), thread_count(size), touch)
    except BaseException:
        os.close(descriptor)
        raise
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    key, owned = (os.getpid(), address), OwnedDescriptor(descriptor)
    with _lock:
        _descriptors[key] = owned
    weakref.finalize(memory, _forget, key, owned).atexit = False
    return tensor


def _forget(key: tuple[int, int], descriptor: OwnedDescriptor) -> None:
    with _lock:
        _descriptors.pop(key, None)
    descriptor.close()


def descriptor_of(tensor: torch.Tensor) -> OwnedDescriptor | None:
    """The memfd that holds the storage of a tensor of this process; None if it is other memory."""
    with _lock:
        return _descriptors.get((os.getpid(), tensor.untyped_storage().data_ptr()))


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether a process has a lasting mapping of the tensor's memory."""
    descriptor = descriptor_of(tensor)
    if descriptor is None:
        return False
    if not descriptor.ours:
        return True  # another part of this process closed it, so its lock cannot be looked at
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


class OpenMemory:
    """The memfd of another process, or of this one, opened to be mapped. A context manager. Raises as `open_memfd`."""

    def __init__(self, plane: str, owner: Peer, descriptor: int, writable: bool = False) -> None:
        self.writable = writable
        self._path = Path(f"/proc/{owner.pid}/fd/{descriptor}")
        access = os.O_RDWR if writable else os.O_RDONLY
        self._descriptor = open_memfd(plane, owner, descriptor, SHAREABLE_MEMORY, access)
        if not fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            self._descriptor.close()
            raise forged(f"process {owner.pid} offers memory that may shrink")

    def hold(self) -> None:
        """Make a mapping last: the owner does not write to the memory before it ends. Raises `RegionGone`.

        The lock belongs to the open file, which the mapping keeps open.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegionGone("the owner of the region is about to write to it anew") from None

    @property
    def inode(self) -> int:
        return os.fstat(self._descriptor).st_ino

    @property
    def nbytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def map(self, offset: int, nbytes: int, *, read_only: bool = False) -> torch.Tensor:
        """Bytes of the memory, as a uint8 tensor that keeps them. Raises `CorruptData` if they are not all there."""
        check_range(offset, nbytes, self.nbytes)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        before = offset % mmap.PAGESIZE
        kind = mmap.MAP_SHARED if self.writable or read_only else mmap.MAP_PRIVATE | _MAP_NORESERVE
        memory = _map(self._descriptor, offset - before, before + nbytes, kind, not read_only)
        return torch.frombuffer(memory, dtype=torch.uint8)[before:]

    def is_current(self, inode: int) -> bool:
        """Whether the owner still has this memory."""
        try:
            return self._path.stat().st_ino == inode
        except OSError:
            return False

    def __enter__(self) -> OpenMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptor.close()


class MappedMemory:
    """Mappings for reads, kept for the next one: all pages of each are in the page table. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, bool, bool], tuple[OpenMemory, torch.Tensor]] = {}

    def get(self, memory: OpenMemory, offset: int, nbytes: int, *, read_only: bool = False) -> torch.Tensor:
        """Bytes of the memory, as a tensor. Raises `CorruptData` if they are not all there."""
        check_range(offset, nbytes, memory.nbytes)
        kind = memory.inode, memory.writable, read_only
        with self._lock:
            known = self._mapped.pop(kind, None)
            if known is not None:
                self._mapped[kind] = known
        if known is None:
            known = memory, memory.map(0, memory.nbytes, read_only=read_only)
            advise(known[1].data_ptr(), known[1].nbytes, _POPULATE_WRITE if memory.writable else _POPULATE_READ)
            with self._lock:
                self._mapped = {key: each for key, each in self._mapped.items() if each[0].is_current(key[0])}
                for oldest in list(self._mapped)[: max(0, len(self._mapped) - MOST_MAPPED + 1)]:
                    del self._mapped[oldest]
                self._mapped[kind] = known
        return known[1][offset : offset + nbytes]

    def clear(self) -> None:
        """Let all mappings go, except for those in use."""
        with self._lock:
            self._mapped.clear()


def check_range(offset: int, nbytes: int, there: int) -> None:
    """Raise `CorruptData` unless there are `nbytes` at `offset` of memory of size `there`."""
    if not 0 <= offset <= offset + nbytes <= there:
        raise forged(f"{nbytes} bytes at {offset} are not in the memory that it names")


def _map(descriptor: int, offset: int, nbytes: int, kind: int, writable: bool = True) -> ctypes.Array[ctypes.c_uint8]:
    """Map bytes of a file, from the start of a page on, until the returned array is gone. Its huge pages stay whole."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = map_pages(
        None, size + HUGE_PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    address = reserved + (offset - reserved) % HUGE_PAGE
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        map_pages(address, size, access, kind | _MAP_FIXED, descriptor, offset)
    except BaseException:
        unmap_pages(reserved, size + HUGE_PAGE)
        raise
    for start, end in ((reserved, address), (address + size, reserved + size + HUGE_PAGE)):
        if start < end:
            unmap_pages(start, end - start)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    own_mapping(memory, address, Mapping(size, writable))
    return memory


def thread_count(nbytes: int) -> int:
    """The number of threads that share a large read: as many as torch would use."""
    return max(1, min(torch.get_num_threads(), nbytes // SHARE_BYTES))


def run_in_threads(nbytes: int, count: int, copy: Callable[[int, int], None]) -> None:
    """Run `copy(start, nbytes)` for `count` pieces, the first in this thread, each other in its own.

    Returns or raises only after all of them have ended.
    """
    if count == 1:
        copy(0, nbytes)
        return
    share = -(-nbytes // count)
    with ThreadPoolExecutor(count - 1, "holdfast-read") as pool:
        others = [pool.submit(copy, start, min(share, nbytes - start)) for start in range(share, count * share, share)]
        copy(0, share)
    for other in others:
        other.result()
