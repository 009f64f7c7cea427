"""`HostPlane`: other processes of the host find its regions in a table of their owner, copy and map them.

The kernel copies (`process_memory`) between the tensors of the two processes; nothing is staged, and the owner takes no
part. Every block is copied together with its region's generation in the owner's `region_table`, which reveals a region
that was closed, or closed and exposed again, in the meantime. Regions of this process are copied by `memmove`.

A copy goes block by block, so a deadline, a closed plane and a closed region are noticed within a fraction of a
millisecond. It runs in the calling thread, with further threads where torch too would use several; the returned work is
complete.

A region in memory of `empty(mappable=True)` can be mapped, too: its address names the memfd and the row. A reader that
finds the row's generation after it has opened the memfd has opened that region. Subclasses reach other hosts.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import ClassVar

import msgspec
import torch

from holdfast.backends.common.process_memory import permit_peers, put_on_huge_pages, read_process, write_process
from holdfast.backends.common.region_table import (
    WRITABLE,
    RegionTable,
    TableAddress,
    check_size,
    generation_in,
    held_open,
    open_table,
)
from holdfast.backends.common.shareable_memory import (
    MappedMemory,
    OpenMemory,
    allocate_shareable,
    descriptor_of,
    is_lent,
    run_in_threads,
    thread_count,
)
from holdfast.comms.errors import BackendUnavailable, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region
from holdfast.comms.quantities import integer, seconds
from holdfast.comms.system import forks
from holdfast.comms.system.local_causes import MEMORY_HINT
from holdfast.comms.tensors.memory import ExposedMemory, empty, moved_error
from holdfast.comms.tensors.packing import plain_tensor
from holdfast.comms.transport.liveness import region_closed, region_gone, this_host, this_process
from holdfast.comms.work import Work

BLOCK_BYTES = 2 << 20
"""Bytes between two checks of deadline and generation: 0.2 ms at memory speed, so the checks cost nothing."""

LOCK_SECONDS = 5.0

READERS = 256
"""The number of regions for which a plane caches readers."""

_Words = ctypes.c_uint64 * 4
Withdraw = Callable[[], object]


class BlockCopy(msgspec.Struct, frozen=True):
    """Bytes to copy from a region to the memory at `address`, which `tensor` keeps, or the other way if `writing`.

    `look()` raises if the plane was closed or the time is over.
    """

    handle: Handle
    tensor: torch.Tensor
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
        return msgspec.structs.replace(self, address=self.address + start, offset=self.offset + start, nbytes=nbytes)

    def blocks(self, most: int) -> Iterator[BlockCopy]:
        """The copies of its blocks, of at most so many bytes; one if it has no bytes."""
        for start in range(0, self.nbytes, most) or (0,):
            yield self.part(start, min(most, self.nbytes - start))


class HostRegion(Region):
    """A row in the table of this process, and the memory that it names. `withdraw` ends what else reaches that."""

    def __init__(
        self, plane: HostPlane, address: bytes, memory: ExposedMemory, slot: int, writable: bool, withdraw: Withdraw
    ) -> None:
        self.open, self.memory, self.slot, self.writable, self.withdraw = True, memory, slot, writable, withdraw
        self.writing = threading.Lock()
        """Held while this process writes a block."""
        self._plane, self._handle = plane, Handle(plane.name, address, memory.nbytes)
        _own[os.getpid(), plane.name, address] = self
        forks.refuse_in_children(self, "a region of exposed memory", ("handle", "open"))

    @property
    def handle(self) -> Handle:  # type: ignore[override]
        """Raises `RegionGone`, and closes the region, if its tensor has other memory now."""
        if self.open and self.memory.moved:
            self.close()
            raise moved_error("a region")
        return self._handle

    def close(self) -> None:
        with self.writing:
            was_open, self.open = self.open, False
        if was_open:
            self._plane.retract(self)


_own: weakref.WeakValueDictionary[tuple[int, str, bytes], HostRegion] = weakref.WeakValueDictionary()
"""The regions of this process, by its id, plane and address."""


def _own_region(handle: Handle) -> HostRegion | None:
    """The region of a handle, if it is one of this process, and open."""
    own = _own.get((os.getpid(), handle.plane, handle.address))
    return own if own is not None and own.open else None


class HostPlane(MemoryPlane):
    """See the module; this is the plane of shm. A forked child that uses its parent's has one without own regions."""

    name = "shm"
    can_map = True
    address: ClassVar[type[TableAddress]] = TableAddress
    beyond_host: ClassVar[str] = "use ucx or nixl"
    """What to do to reach a process of another host."""

    def __init__(self) -> None:
        self._closed = False
        self._count = itertools.count(1)
        self._begin()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        if self._table is not None:
            self._table.close()
        self._begin()

    def _begin(self) -> None:
        """Begin without mappings and regions: in a new plane, and in that of a forked child."""
        self._lock = threading.RLock()
        self._table: RegionTable | None = None
        self._readers: dict[bytes, list[_Reader]] = {}
        self._mapped = MappedMemory()
        self._regions: set[HostRegion] = set()

    # -- exposing

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        if mappable:
            return allocate_shareable(nbytes, self._check_open)
        return empty(nbytes, torch.uint8)

    def improve(self, memory: torch.Tensor) -> None:
        self._check_open()
        put_on_huge_pages(memory.data_ptr(), memory.nbytes, look=self._check_open)

    def is_lent(self, memory: torch.Tensor) -> bool:
        return is_lent(memory)

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> HostRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        memory = ExposedMemory(tensor)
        with self._lock:
            table = self._own_table()
            place = table.fill(memory.address, memory.nbytes, writable, _memfd_of(memory.held))
            try:
                address, withdraw = self._offer(place, memory, writable)
            except BaseException:
                table.invalidate(place.slot)
                table.free(place.slot)
                raise
            region = HostRegion(self, address, memory, place.slot, writable, withdraw)
            self._regions.add(region)
        return region

    def _own_table(self) -> RegionTable:
        """The table of this process, made on first use. The lock is held."""
        self._check_open()  # another thread may have closed the plane: nobody would close a table that is made then
        if self._table is None:
            permit_peers()
            self._table = RegionTable(this_process())
        return self._table

    def _offer(self, place: TableAddress, memory: ExposedMemory, writable: bool) -> tuple[bytes, Withdraw]:
        """The address of a region, and what to call when it is closed. The lock is held."""
        return place.encode(), lambda: None

    def _place(self, handle: Handle) -> TableAddress:
        """Where the region of a handle lies on its host. Raises `CorruptData`."""
        return self.address.decode(handle.address)

    def retract(self, region: HostRegion) -> None:
        """Invalidate the row of a region; free row and tensor once no process writes to it. Called once for each."""
        with self._lock:
            table = self._table
            if table is None:
                return
            written = table.invalidate(region.slot)
            region.withdraw()
        if written:
            table.wait_for_writers(region.slot)
        with self._lock:
            table.free(region.slot)
            self._regions.discard(region)

    # -- mapping

    def map(self, handle: Handle, *, lasting: bool) -> torch.Tensor:
        if not lasting:
            return self._map_and_keep(handle)
        place, (descriptor, offset) = self._mappable(handle)
        with OpenMemory(self.name, place.owner, descriptor) as memory:
            memory.hold()
            self._check_generation(place)  # after the lock was taken: it stays as it is
            return memory.map(offset, handle.nbytes)

    def map_read_only(self, handle: Handle) -> torch.Tensor:
        return self._map_and_keep(handle, read_only=True)

    def map_writable(self, handle: Handle) -> torch.Tensor:
        return self._map_and_keep(handle, writable=True)

    def _map_and_keep(self, handle: Handle, read_only: bool = False, writable: bool = False) -> torch.Tensor:
        """A mapping that is kept for the next read of the same memory."""
        place, (descriptor, offset) = self._mappable(handle)
        with OpenMemory(self.name, place.owner, descriptor, writable) as memory:
            if writable:
                self._open_region(handle, writing=True).release(True)
            else:
                self._check_generation(place)
            return self._mapped.get(memory, offset, handle.nbytes, read_only=read_only)

    def _check_generation(self, place: TableAddress) -> None:
        """Raise `RegionGone` unless the region is open."""
        with open_table(self.name, place) as table:
            if generation_in(table, place.slot) != place.generation:
                raise region_closed(place.owner.pid)

    def _mappable(self, handle: Handle) -> tuple[TableAddress, tuple[int, int]]:
        """The place of a region, its memfd and its first byte there. Raises `Unsupported`."""
        self._check_open()
        place = self._place(handle) if handle.plane == self.name else None
        if place is None or place.memory is None or place.owner.host != this_host():
            raise Unsupported(
                "mapping this region",
                "read it: only a region of this host in memory of empty(mappable=True) can be mapped",
            )
        return place, place.memory

    # -- reading and writing

    def read(self, handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        address = contiguous_address(into, "into", self.name)
        return self._copy("memory read", handle, address, into, offset, timeout, writing=False)

    def write(self, handle: Handle, source: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
        address = contiguous_address(source, "source", self.name)
        return self._copy("memory write", handle, address, source, offset, timeout, writing=True)

    def _copy(
        self, op: str, handle: Handle, address: int, tensor: torch.Tensor, offset: int, timeout: float, writing: bool
    ) -> Work:
        """Copy all of `tensor`, which lies at `address`, to or from the region of a handle, after all checks."""
        self._check_open()
        began, seq, nbytes = time.monotonic(), next(self._count), tensor.nbytes
        offset = integer(offset, "offset")
        if offset < 0 or offset + nbytes > handle.nbytes:
            raise ValueError(f"{op} of {nbytes} bytes at byte {offset} is outside the region of {handle.nbytes} bytes")
        if handle.plane != self.name:
            raise Unsupported(
                f"a handle of memory plane {handle.plane!r} on plane {self.name!r}",
                f"open it with comms.memory({handle.plane!r})",
            )
        own = _own_region(handle)  # a block of the copy might overwrite what a later block reads
        if own is not None and 0 < abs(own.memory.address + offset - address) < nbytes:
            raise ValueError(
                f"{op}: the tensor overlaps the bytes of the region, which lies in this process; copy first"
            )
        deadline = began + seconds(timeout)

        def look() -> None:
            self._check_open()
            if time.monotonic() > deadline:
                raise OpTimeout(op, seq, time.monotonic() - began)

        def body() -> None:
            self._in_blocks(BlockCopy(handle, tensor, address, offset, nbytes, deadline, writing, look))
            if not writing and nbytes and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

        work = Work(op)
        work.run(body)
        return work

    def _in_blocks(self, copy: BlockCopy) -> None:
        """Copy block by block; `copy.look()` is called before each."""
        threads = 1 if copy.writing else thread_count(copy.nbytes)
        run_in_threads(copy.nbytes, threads, lambda at, nbytes: self._copy_share(copy.part(at, nbytes)))

    def _copy_share(self, copy: BlockCopy) -> None:
        region = self._open_region(copy.handle, copy.writing)
        unharmed = False
        try:
            check_size(copy.handle, region.nbytes)
            for block in copy.blocks(BLOCK_BYTES):
                copy.look()
                region.move(block)
            unharmed = True
        finally:
            region.release(unharmed)

    def _check_open(self) -> None:
        if self._closed:
            raise RegionGone(f"this {self.name} memory plane was closed; open another with comms.memory()")

    def _open_region(self, handle: Handle, writing: bool) -> _OwnRegion | _Reader | _Writer:
        """Access to the region of a handle. Raises `RegionGone`, `CorruptData`, `Unsupported`."""
        if (own := _own_region(handle)) is not None:
            if writing and not own.writable:
                raise read_only()
            return _OwnRegion(own)
        if not writing:
            with suppress(KeyError, IndexError):
                return self._readers[handle.address].pop()
        address = self._place(handle)
        owner = address.owner
        if owner.host != this_host():
            raise Unsupported(
                f"the {self.name} plane cannot reach process {owner.pid} of another host", self.beyond_host
            )
        if writing:
            return _Writer(self.name, address)
        return _Reader(self.name, address, functools.partial(self._reuse, handle.address))

    def _reuse(self, address: bytes, reader: _Reader, unharmed: bool) -> None:
        """Cache a reader for the next read of its region, unless the region proved to be gone."""
        if not unharmed:
            self._readers.pop(address, None)
            return
        if len(self._readers) >= READERS:
            self._readers.clear()
        self._readers.setdefault(address, []).append(reader)

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._release)
            stack.callback(self._mapped.clear)
            for region in list(self._regions):
                stack.callback(region.close)

    def _release(self) -> None:
        """Release everything else, once all regions are closed."""
        with self._lock:
            self._readers.clear()
            table, self._table = self._table, None
            if table is not None:
                table.close()


def _memfd_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The memfd that a tensor lies in, and its first byte there; None if it is other memory."""
    descriptor = descriptor_of(tensor)
    return None if descriptor is None else (int(descriptor), tensor.data_ptr() - tensor.untyped_storage().data_ptr())


class _OwnRegion:
    """An open region of this process; keeps its memory alive for the length of a copy."""

    def __init__(self, region: HostRegion) -> None:
        self._region, self._memory, self.nbytes = region, region.memory.address, region.memory.nbytes

    def move(self, block: BlockCopy) -> None:
        """Copy one block. Raises `RegionGone` if the region is closed: what was read must then not be used."""
        if block.writing:
            with self._region.writing:
                self._check()
                ctypes.memmove(self._memory + block.offset, block.address, block.nbytes)
        else:
            ctypes.memmove(block.address, self._memory + block.offset, block.nbytes)
            self._check()

    def release(self, unharmed: bool) -> None:
        """Does nothing: only the tensor is held."""

    def _check(self) -> None:
        if not self._region.open:
            raise region_closed(os.getpid())


class _TableRegion:
    """A region found in the table of another process. For one thread at a time."""

    def __init__(self, plane: str, address: TableAddress) -> None:
        self._plane, self._pid, self._generation, self._row = plane, address.owner.pid, address.generation, address.row
        self._words = _Words()
        self._seen = ctypes.addressof(self._words)
        self._look()
        _, self._memory, self.nbytes, self.flags = self._words

    def _look(self) -> None:
        """Read the row anew. Raises `RegionGone` if the region is closed."""
        _run(self._plane, read_process, self._pid, self._seen, self._row, 32)
        self._check()

    def _check(self) -> None:
        if self._words[0] != self._generation:
            raise region_closed(self._pid)


class _Reader(_TableRegion):
    """A region to read from."""

    def __init__(self, plane: str, address: TableAddress, reuse: Callable[[_Reader, bool], None]) -> None:
        super().__init__(plane, address)
        self._reuse = reuse
        self._words[1] = self._generation
        self._before, self._after = (self._seen, self._row, 8), (self._seen + 8, self._row, 8)
        """Reads of the generation, before and after a block."""

    def move(self, block: BlockCopy) -> None:
        """Read one block. Raises `RegionGone` if what arrived must not be used."""
        piece = block.address, self._memory + block.offset, block.nbytes
        _run(self._plane, read_process, self._pid, *self._before, *piece, *self._after)
        self._check()
        if self._words[1] != self._generation:
            raise region_closed(self._pid)

    def release(self, unharmed: bool) -> None:
        """End the access; `unharmed` if the copy ended without an error."""
        self._reuse(self, unharmed)


class _Writer(_TableRegion):
    """A region to write to: each block is written under a lock that the owner's `close` waits for."""

    def __init__(self, plane: str, address: TableAddress) -> None:
        super().__init__(plane, address)
        if not self.flags & WRITABLE:
            raise read_only()
        self._slot, self._open = address.slot, ExitStack()
        self._table = self._open.enter_context(open_table(plane, address))

    def move(self, block: BlockCopy) -> None:
        """Write one block. Raises `RegionGone`, without writing, if the region is closed."""
        with held_open(self._table, self._slot, time.monotonic() + LOCK_SECONDS):
            self._look()
            _run(self._plane, write_process, self._pid, block.address, self._memory + block.offset, block.nbytes)
        self._look()

    def release(self, unharmed: bool) -> None:
        self._open.close()


def read_only() -> Unsupported:
    """The error of a write to a region that its owner has not exposed for that."""
    return Unsupported("writing to a read-only region", "its owner must expose it with writable=True")


def _run(plane: str, copy: Callable[..., int], pid: int, *pieces: int) -> None:
    """Copy pieces from or to process `pid` for the plane with this name; raises holdfast's own errors."""
    try:
        copied = copy(pid, *pieces)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise region_gone(pid) from error
        if error.errno != errno.EFAULT:
            raise BackendUnavailable(plane, f"process {pid} may not be read: {error.strerror}", MEMORY_HINT) from error
        copied = 0
    if copied != sum(pieces[2::3]):
        raise RegionGone(f"process {pid} has unmapped the memory of this region; ask it for another one")


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
