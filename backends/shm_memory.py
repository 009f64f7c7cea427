"""The memory plane of one host: any process reads the memory that another exposed, straight from where it
lies.

Copies are done by the kernel (`process_memory`) between the two processes' own tensors: nothing is staged,
and the owner takes no part. What is exposed stands in the owner's `region_table`. Every block is copied
together with its region's generation, so that a region that was closed, or closed and exposed again, in the
meantime is found out.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from holdfast.backends.block_copy import BlockCopyPlane, Reach, contiguous_address
from holdfast.backends.process_memory import HINT, permit_peers, read_process, write_process
from holdfast.backends.region_table import WRITABLE, Address, RegionTable, held_open, open_table, slot_address
from holdfast.comms.errors import BackendUnavailable, RegionGone, Unsupported
from holdfast.comms.liveness import this_host, this_process
from holdfast.comms.plane import Handle, Region

HUGE_PAGE = 2 << 20
LOCK_SECONDS = 5.0

_Words = ctypes.c_uint64 * 4
Pieces = Sequence[tuple[int, int, int]]


def open_plane() -> ShmPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return ShmPlane()


class ShmRegion(Region):
    """A row in the table of this process, and the tensor whose memory it names."""

    def __init__(self, plane: ShmPlane, address: Address, tensor: torch.Tensor) -> None:
        self.handle = Handle(plane.name, address.encode(), tensor.nbytes)
        self.slot = address.slot
        self._plane, self._tensor, self._pid = plane, tensor, os.getpid()
        self._open = True

    def close(self) -> None:
        if self._open and os.getpid() == self._pid:
            self._open = False
            self._plane.strike_out(self)


class ShmPlane(BlockCopyPlane):
    """See `MemoryPlane`. A forked child that uses its parent's plane has one without regions of its own."""

    name = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._table: RegionTable | None = None
        self._regions: dict[int, ShmRegion] = {}
        self._bases: dict[tuple[int, int, int], int] = {}

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            if self._table is not None:
                self._table.close()
            self._begin()

    def empty(self, nbytes: int) -> torch.Tensor:
        if nbytes < HUGE_PAGE:
            return super().empty(nbytes)
        memory = mmap.mmap(
            -1, -(-nbytes // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel built without them: only slower
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> ShmRegion:
        self._check_open()
        self._notice_fork()
        memory = contiguous_address(tensor, "an exposed tensor", self.name)
        with self._lock:
            if self._table is None:
                permit_peers()
                self._table = RegionTable(this_process())
            region = ShmRegion(self, self._table.fill(memory, tensor.nbytes, writable), tensor)
            self._regions[region.slot] = region
        return region

    def strike_out(self, region: ShmRegion) -> None:
        """Invalidate a region's slot, and let slot and tensor go once nobody writes to it. Called once for
        each.
        """
        with self._lock:
            table = self._table
            if table is None:
                return
            written = table.invalidate(region.slot)
        if written:
            table.wait_for_writers(region.slot)
        with self._lock:
            table.free(region.slot)
            self._regions.pop(region.slot, None)

    @contextmanager
    def _reach(self, handle: Handle, writing: bool) -> Iterator[Reach]:
        self._notice_fork()
        address = Address.decode(handle.address)
        owner = address.owner
        if owner.host != this_host():
            raise Unsupported(
                f"the shm plane cannot reach process {owner.pid} of another host", "use ucx or nixl"
            )
        with ExitStack() as stack:
            if writing:
                descriptor, base = stack.enter_context(open_table(address))
                yield _Writer(address, base, descriptor)
            else:
                key = (owner.pid, owner.started, address.table)
                known = self._bases.get(key)
                if known is None:
                    with open_table(address) as (_, known):
                        self._bases[key] = known
                try:
                    yield _Reader(address, known)
                except RegionGone:
                    self._bases.pop(key, None)
                    raise

    def close(self) -> None:
        self._notice_fork()
        if self._closed:
            return
        self._closed = True
        with self._lock:
            regions = list(self._regions.values())
            self._bases.clear()
        with ExitStack() as stack:
            stack.callback(self._drop_table)
            for region in regions:
                stack.callback(region.close)

    def _drop_table(self) -> None:
        with self._lock:
            table, self._table = self._table, None
            if table is not None:
                table.close()


class _Reader(Reach):
    """A region of another process (or this one). Knows where it lies, having seen its slot."""

    def __init__(self, address: Address, base: int) -> None:
        self.pid, self.generation = address.owner.pid, address.generation
        self._slot = slot_address(base, address.slot)
        self._words = _Words()
        self._seen = ctypes.addressof(self._words)
        _move(read_process, self.pid, [(self._seen, self._slot, 32)])
        self._check_generation()
        _, self.memory, self.nbytes, self.flags = self._words

    def pull(self, address: int, offset: int, nbytes: int) -> None:
        _move(read_process, self.pid, [(address, self.memory + offset, nbytes), (self._seen, self._slot, 8)])
        self._check_generation()

    def push(self, address: int, offset: int, nbytes: int) -> None:
        raise NotImplementedError

    def _look(self) -> None:
        _move(read_process, self.pid, [(self._seen, self._slot, 8)])
        self._check_generation()

    def _check_generation(self) -> None:
        if self._words[0] != self.generation:
            raise RegionGone(f"process {self.pid} closed the region; what was read of it must not be used")


class _Writer(_Reader):
    """A region to write to: every block under a lock that the owner's `close` waits for."""

    def __init__(self, address: Address, base: int, descriptor: int) -> None:
        super().__init__(address, base)
        if not self.flags & WRITABLE:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        self._descriptor, self._row = descriptor, address.slot

    def push(self, address: int, offset: int, nbytes: int) -> None:
        with held_open(self._descriptor, self._row, time.monotonic() + LOCK_SECONDS):
            self._look()
            _move(write_process, self.pid, [(address, self.memory + offset, nbytes)])
        self._look()


def _move(call: Callable[[int, Pieces], int], pid: int, pieces: Pieces) -> None:
    try:
        moved = call(pid, pieces)
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise RegionGone(f"process {pid}, which exposed this region, is gone") from error
        if error.errno != errno.EFAULT:
            raise BackendUnavailable(
                "shm", f"process {pid} may not be read: {error.strerror}", HINT
            ) from error
        moved = 0
    if moved != sum(nbytes for _, _, nbytes in pieces):
        raise RegionGone(f"process {pid} has no such memory any more")
