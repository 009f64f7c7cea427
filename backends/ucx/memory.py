"""The memory plane of UCX: get and put on the very memory that another process exposed.

On one host (the default) the kernel copies, straight between the two tensors, and the table of regions is shared
memory: the owner takes no part, it may be busy or stopped. With UCX_TLS set to something that crosses hosts, for
example "tcp,self", the owner's progress thread answers: see `active`.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import torch

from holdfast.backends.block_copy import LockedCopyPlane, TableRegion, contiguous_address
from holdfast.backends.process_memory import permit_peers
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.active import ActiveMessages
from holdfast.backends.ucx.active_region import ActiveTable, AskedRegion
from holdfast.backends.ucx.progress import ProgressThread
from holdfast.backends.ucx.regions import Address, Table
from holdfast.backends.ucx.remote import ConnectionLost, Owner, RemoteRegion
from holdfast.backends.ucx.worker import Transports, Worker
from holdfast.comms.errors import CorruptData, OpTimeout, RegionGone, Unsupported
from holdfast.comms.liveness import this_host, this_process
from holdfast.comms.plane import Handle

BLOCK_BYTES, FAR_BLOCK_BYTES = 2 << 20, 16 << 20
"""Bytes between two looks at the generation, by the kernel's copies and over a network."""
ATTEMPTS = 3
"""How often a block is tried, over a new connection each time."""
REMEMBERED = 256
"""How many regions of others a plane keeps keys to."""


def open_plane() -> UcxPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return UcxPlane()


class UcxRegion(TableRegion):
    """See `TableRegion`."""

    def __init__(self, plane: UcxPlane, tensor: torch.Tensor, address: Address) -> None:
        super().__init__(Handle(plane.name, address.encode(), tensor.nbytes), tensor, plane.strike_out)
        self.address = address


class UcxPlane(LockedCopyPlane):
    """See `MemoryPlane`. A forked child that uses its parent's plane has one without regions of its own."""

    name = "ucx"

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._block = BLOCK_BYTES
        self._worker: Worker | None = None
        self._progress: ProgressThread | None = None
        self._table: Table | ActiveTable | None = None
        self._messages: ActiveMessages | None = None
        self._regions: set[UcxRegion] = set()
        self._owners: dict[bytes, Owner] = {}
        self._remote: dict[Handle, RemoteRegion | AskedRegion] = {}

    def _notice_fork(self) -> None:
        if os.getpid() != self._pid:
            self._begin()

    def _started(self) -> Worker:
        """The worker, made when it is first needed. The lock is held."""
        if self._worker is None:
            over = Transports.choose(one_host=True)
            permit_peers()
            if over.emulated:
                self._worker = Worker(libucp.FEATURE_AM, over, self._note_failure)
                self._messages = ActiveMessages(self._worker)
            else:
                self._worker = Worker(libucp.FEATURE_RMA | libucp.FEATURE_AMO64, over)
            if not over.local:
                self._block = FAR_BLOCK_BYTES
                self._progress = ProgressThread(self._worker, self._lock, eager=len(os.sched_getaffinity(0)) > 1)
        return self._worker

    # -- exposing

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> UcxRegion:
        self._check_open()
        self._notice_fork()
        memory = contiguous_address(tensor, "an exposed tensor", self.name)
        with self._lock:
            worker = self._started()
            if self._table is None:
                messages = self._messages
                self._table = (
                    Table(worker, this_process()) if messages is None else ActiveTable(messages, worker, this_process())
                )
            region = UcxRegion(self, tensor, self._table.expose(memory, tensor.nbytes, writable))
            self._regions.add(region)
        return region

    def strike_out(self, region: UcxRegion) -> None:
        """Invalidate a region's row; let row and tensor go once nobody writes to it. Called once for each."""
        with self._lock:
            table = self._table
            if table is None:
                return
            table.invalidate(region.address)
        if region.address.writable:
            table.wait_for_writer(region.address)
        with self._lock:
            table.free(region.address)
            self._regions.discard(region)

    # -- reading and writing

    def _move(self, handle: Handle, address: int, offset: int, nbytes: int, deadline: float, writing: bool) -> None:
        """One block, over a new connection if the one that is there is broken."""
        for attempt in range(1, ATTEMPTS + 1):
            region = None
            try:
                region = self._remote.get(handle) or self._find(handle, deadline)
                (region.push if writing else region.pull)(address, offset, nbytes, deadline)
            except (RegionGone, OpTimeout) as error:
                if region is not None:
                    self._forget(region.owner)
                if attempt == ATTEMPTS or not isinstance(error, ConnectionLost):
                    raise
            else:
                return

    def _find(self, handle: Handle, deadline: float) -> RemoteRegion | AskedRegion:
        address = Address.decode(handle.address)
        if handle.nbytes != address.nbytes:
            raise CorruptData(f"a handle of {handle.nbytes} bytes for a region of {address.nbytes}: a forged handle")
        worker = self._started()
        if worker.over.emulated != address.asked:
            raise Unsupported(
                f"reaching process {address.owner.pid} over {worker.over.tls}", "set one UCX_TLS for both processes"
            )
        if worker.over.local and address.owner.host != this_host():
            raise Unsupported(
                f"reaching process {address.owner.pid} of another host over {worker.over.tls}",
                "set UCX_TLS=tcp,self (or what your network has) for both processes",
            )
        owner = self._owners.get(address.worker)
        if owner is None:
            owner = self._owners[address.worker] = Owner(worker, address)
        if len(self._remote) >= REMEMBERED:
            self._drop_keys(list(self._remote))
        try:
            region: RemoteRegion | AskedRegion
            if self._messages is None:
                region = RemoteRegion(owner, address)
            else:
                region = AskedRegion(owner, address, self._messages)
            region.check(deadline)
        except (RegionGone, OpTimeout):
            self._forget(owner)
            raise
        except libucp.UcxError as error:
            self._forget(owner)
            raise ConnectionLost(f"process {owner.pid} cannot be reached any more: {error}") from error
        self._remote[handle] = region
        return region

    def _forget(self, owner: Owner) -> None:
        """Drop the connection to an owner, which may be broken, and what was known of its regions."""
        self._drop_keys([handle for handle, region in self._remote.items() if region.owner is owner])
        for address, known in list(self._owners.items()):
            if known is owner:
                del self._owners[address]
                owner.close()

    def _note_failure(self, key: int, why: str) -> None:
        """A connection broke; called by UCX while it makes progress."""
        for owner in self._owners.values():
            if owner.key == key:
                owner.broken = why

    def _drop_keys(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._remote.pop(handle).close()

    # -- the end

    def close(self) -> None:
        self._notice_fork()
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._release)
            for region in list(self._regions):
                stack.callback(region.close)

    def _release(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        with self._lock:
            for owner in list(self._owners.values()):
                self._forget(owner)
            table, self._table = self._table, None
            if table is not None:
                table.close()
            if self._worker is not None:
                self._worker.close()
                self._worker = self._messages = None
