"""The memory plane of one host: any process reads the memory that another exposed, where it lies.

The kernel copies (`process_memory`) between the tensors of the two processes; nothing is staged, and the owner takes no
part. The owner lists exposed memory in its `region_table`. Every block is copied together with its region's generation,
which reveals a region that was closed, or closed and exposed again, in the meantime.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
from msgspec.structs import replace

from holdfast.backends.common.block_copy import BlockCopyPlane, RegionAccess, TableRegion, contiguous_address
from holdfast.backends.common.mappable_plane import MappablePlane, place_of
from holdfast.backends.common.process_memory import permit_peers, read_process, write_process
from holdfast.backends.common.region_table import (
    WRITABLE,
    RegionTable,
    TableAddress,
    held_open,
    open_table,
    slot_address,
)
from holdfast.backends.common.shareable_memory import OpenMemory
from holdfast.comms.errors import BackendUnavailable, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import MEMORY_HINT
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.liveness import this_host, this_process

LOCK_SECONDS = 5.0

READERS = 256
"""The number of regions for which a plane caches readers."""

_Words = ctypes.c_uint64 * 4


def open_plane() -> ShmPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return ShmPlane()


class ShmRegion(TableRegion):
    """See `TableRegion`."""

    def __init__(self, plane: ShmPlane, address: TableAddress, memory: ExposedMemory) -> None:
        super().__init__(Handle(plane.name, address.encode(), memory.nbytes), memory, plane.retract)
        self.slot = address.slot


class ShmPlane(BlockCopyPlane, MappablePlane):
    """See `MemoryPlane`. A forked child that uses its parent's plane has one without regions of its own."""

    name = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        if self._table is not None:
            self._table.close()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._table: RegionTable | None = None
        self._bases: dict[tuple[int, int, int], int] = {}
        self._readers: dict[bytes, list[_Reader]] = {}
        self._begin_mapping()

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> ShmRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        memory = ExposedMemory(tensor)
        with self._lock:
            if self._table is None:
                permit_peers()
                self._table = RegionTable(this_process())
            address = self._table.fill(memory.address, memory.nbytes, writable)
            region = ShmRegion(self, replace(address, memory=place_of(memory.held)), memory)
            self._regions.add(region)
        return region

    def _place(self, handle: Handle) -> TableAddress:
        return TableAddress.decode(handle.address)

    def map_writable(self, handle: Handle) -> torch.Tensor:
        place, (descriptor, offset) = self._mappable(handle)
        with OpenMemory(self.name, place.owner, descriptor, writable=True) as memory:
            self._open_region(handle, writing=True).release(True)
            return self._mapped.get(memory, offset, handle.nbytes)

    def retract(self, region: ShmRegion) -> None:
        """Invalidate the slot of a region; free slot and tensor once no process writes to it. Called once for each."""
        with self._lock:
            table = self._table
            if table is None:
                return
            written = table.invalidate(region.slot)
        if written:
            table.wait_for_writers(region.slot)
        with self._lock:
            table.free(region.slot)
            self._regions.discard(region)

    def _open_region(self, handle: Handle, writing: bool) -> RegionAccess:
        if not writing:
            with suppress(KeyError, IndexError):
                return self._readers[handle.address].pop()
        address = TableAddress.decode(handle.address)
        owner = address.owner
        if owner.host != this_host():
            raise Unsupported(f"the shm plane cannot reach process {owner.pid} of another host", "use ucx or nixl")
        if writing:
            return _Writer(address)
        key = (owner.pid, owner.started, address.table)
        base = self._bases.get(key)
        if base is None:
            with open_table(self.name, address) as (_, base):
                self._bases[key] = base
        try:
            return _Reader(address, base, functools.partial(self._reuse, handle.address))
        except RegionGone:
            self._bases.pop(key, None)
            raise

    def _reuse(self, address: bytes, reader: _Reader, unharmed: bool) -> None:
        """Cache a reader for the next read of its region, unless the region proved to be gone."""
        if not unharmed:
            self._readers.pop(address, None)
            return
        if len(self._readers) >= READERS:
            self._readers.clear()
        self._readers.setdefault(address, []).append(reader)

    def _release(self) -> None:
        with self._lock:
            self._bases.clear()
            self._readers.clear()
            table, self._table = self._table, None
            if table is not None:
                table.close()


class _Reader(RegionAccess):
    """A region found in its owner's table, in another process or in this one. For one thread at a time."""

    def __init__(self, address: TableAddress, base: int, reuse: Callable[[_Reader, bool], None]) -> None:
        self._pid, self._generation, self._reuse = address.owner.pid, address.generation, reuse
        row = slot_address(base, address.slot)
        self._words = _Words()
        seen = ctypes.addressof(self._words)
        _run(read_process, self._pid, seen, row, 32)
        self._check()
        _, self._memory, self.nbytes, self.flags = self._words
        self._words[1] = self._generation
        self._before, self._after = (seen, row, 8), (seen + 8, row, 8)
        """Reads of the generation, before and after a block."""

    def pull(self, address: int, offset: int, nbytes: int) -> None:
        _run(read_process, self._pid, *self._before, address, self._memory + offset, nbytes, *self._after)
        self._check()
        if self._words[1] != self._generation:
            raise RegionGone(_closed(self._pid))

    def push(self, address: int, offset: int, nbytes: int) -> None:
        raise NotImplementedError

    def release(self, unharmed: bool) -> None:
        self._reuse(self, unharmed)

    def _check(self) -> None:
        if self._words[0] != self._generation:
            raise RegionGone(_closed(self._pid))


class _Writer(RegionAccess):
    """A region to write to: each block is written under a lock that the owner's `close` waits for."""

    def __init__(self, address: TableAddress) -> None:
        self._pid, self._generation, self._slot = address.owner.pid, address.generation, address.slot
        self._words = _Words()
        self._open = ExitStack()
        with ExitStack() as undo:
            self._descriptor, base = undo.enter_context(open_table("shm", address))
            self._row = slot_address(base, address.slot)
            self._look()
            _, self._memory, self.nbytes, flags = self._words
            if not flags & WRITABLE:
                raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
            self._open = undo.pop_all()

    def pull(self, address: int, offset: int, nbytes: int) -> None:
        raise NotImplementedError

    def push(self, address: int, offset: int, nbytes: int) -> None:
        with held_open(self._descriptor, self._slot, time.monotonic() + LOCK_SECONDS):
            self._look()
            _run(write_process, self._pid, address, self._memory + offset, nbytes)
        self._look()

    def release(self, unharmed: bool) -> None:
        self._open.close()

    def _look(self) -> None:
        _run(read_process, self._pid, ctypes.addressof(self._words), self._row, 32)
        if self._words[0] != self._generation:
            raise RegionGone(_closed(self._pid))


def _closed(pid: int) -> str:
    return f"process {pid} closed the region; what was read of it must not be used"


def _run(copy: Callable[..., int], pid: int, *pieces: int) -> None:
    """Copy pieces from or to process `pid`; raises holdfast's own errors."""
    try:
        copied = copy(pid, *pieces)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise RegionGone(f"process {pid}, which exposed this region, is gone") from error
        if error.errno != errno.EFAULT:
            raise BackendUnavailable("shm", f"process {pid} may not be read: {error.strerror}", MEMORY_HINT) from error
        copied = 0
    if copied != sum(pieces[2::3]):
        raise RegionGone(f"process {pid} has no such memory any more")
