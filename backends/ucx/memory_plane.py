"""The memory plane of UCX: get and put on memory of another process where it lies.

On one host (the default) the kernel copies between the two tensors, and the table of regions is shared memory: the
owner takes no part, it may be busy or stopped. With UCX_TLS set to transports that cross hosts, for example "tcp,self",
the owner's progress thread answers: see `onesided.channel`. Over either, processes of the host map what lies in
mappable memory of `empty`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from msgspec.structs import replace

from holdfast.backends.common.block_copy import (
    TableRegion,
    contiguous_address,
    run_in_threads,
    thread_count,
)
from holdfast.backends.common.mappable_plane import MappablePlane, place_of
from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.common.region_table import RegionTable, TableAddress
from holdfast.backends.ucx.onesided.message_region import MessageTable
from holdfast.backends.ucx.onesided.read_worker import ReadWorker
from holdfast.backends.ucx.onesided.regions import UcxAddress, UcxRegionTable
from holdfast.backends.ucx.worker import Transports
from holdfast.comms.memory_plane import Handle
from holdfast.comms.system import forks
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.liveness import this_process


def open_plane() -> UcxPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return UcxPlane()


class UcxRegion(TableRegion):
    """See `TableRegion`."""

    def __init__(self, plane: UcxPlane, memory: ExposedMemory, address: UcxAddress) -> None:
        super().__init__(Handle(plane.name, address.encode(), memory.nbytes), memory, plane.retract)
        self.address = address


class UcxPlane(MappablePlane):
    """See `MemoryPlane`. A forked child that uses its parent's plane has one without regions of its own."""

    name = "ucx"

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        forks.never_destroy((self._read_workers, self._table, self._regions))
        if self._mapping_rows is not None:
            self._mapping_rows.close()
        self._begin()

    def _begin(self) -> None:
        self._making = threading.Lock()
        self._read_workers: list[ReadWorker] = []
        self._table: UcxRegionTable | MessageTable | None = None
        self._mapping_rows: RegionTable | None = None
        self._begin_mapping()

    def _read_worker(self, number: int = 0) -> ReadWorker:
        """The read worker `number`, made on first use. Worker 0 has the table of exposed regions."""
        with self._making:
            self._check_open()
            while len(self._read_workers) <= number:
                permit_peers()
                self._read_workers.append(ReadWorker(Transports.choose(one_host=True).connecting_in_background()))
            return self._read_workers[number]

    # -- exposing

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> UcxRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        memory = ExposedMemory(tensor)
        lane = self._read_worker()
        with lane.lock:
            worker, asked = lane.worker, lane.requests
            if self._table is None:
                self._table = (
                    UcxRegionTable(worker, this_process())
                    if asked is None
                    else MessageTable(asked, worker, this_process())
                )
            address = self._table.expose(memory, writable)
            region = UcxRegion(self, memory, replace(address, mapping=self._mapping_row(memory)))
            self._regions.add(region)
        return region

    def _mapping_row(self, memory: ExposedMemory) -> tuple[int, int, int, int, int, int] | None:
        """Enter memory that can be mapped; None for other memory. The lock of the first read worker is held."""
        if (place := place_of(memory.held)) is None:
            return None
        if self._mapping_rows is None:
            self._mapping_rows = RegionTable(this_process())
        row = self._mapping_rows.fill(memory.address, memory.nbytes, writable=False)
        return row.descriptor, row.table, row.slot, row.generation, *place

    def _place(self, handle: Handle) -> TableAddress | None:
        return UcxAddress.decode(handle.address).place

    def retract(self, region: UcxRegion) -> None:
        """Invalidate the row of a region; free row and tensor once no process writes to it. Called once for each."""
        lane = self._read_workers[0]
        with lane.lock:
            table = self._table
            if table is None:
                return
            row = region.address.place
            if row is not None and self._mapping_rows is not None:
                self._mapping_rows.invalidate(row.slot)
                self._mapping_rows.free(row.slot)
            table.invalidate(region.address)
        if region.address.writable:
            table.wait_for_writer(region.address)
        with lane.lock:
            table.free(region.address)
            self._regions.discard(region)

    # -- reading and writing

    def _in_blocks(
        self,
        handle: Handle,
        address: int,
        offset: int,
        nbytes: int,
        deadline: float,
        writing: bool,
        look: Callable[[], None],
    ) -> None:
        several = not writing and self._read_worker().worker.over.local

        def copy(number: int, at: int, piece: int) -> None:
            self._read_worker(number).copy(handle, address + at, offset + at, piece, deadline, writing, look)

        run_in_threads(nbytes, thread_count(nbytes) if several else 1, copy)

    # -- the end

    def _release(self) -> None:
        with self._making:
            for lane in reversed(self._read_workers):
                lane.close(self._drop_table if lane is self._read_workers[0] else lambda: None)

    def _drop_table(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()
        if self._mapping_rows is not None:
            self._mapping_rows.close()
            self._mapping_rows = None
