"""The memory plane of UCX: get and put on memory of another process where it lies.

On one host (the default) the kernel copies between the two tensors, and the table of regions is shared memory: the
owner takes no part, it may be busy or stopped. With UCX_TLS set to transports that cross hosts, for example "tcp,self",
the owner's progress thread answers: see `onesided.active_messages`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch

from holdfast.backends.common.block_copy import (
    CheckedPlane,
    TableRegion,
    contiguous_address,
    run_in_threads,
    thread_count,
)
from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.ucx.onesided.active_region import ActiveTable
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


class UcxPlane(CheckedPlane):
    """See `MemoryPlane`. A forked child that uses its parent's plane has one without regions of its own."""

    name = "ucx"

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        forks.never_destroy((self._read_workers, self._table, self._regions))
        self._begin()

    def _begin(self) -> None:
        self._making = threading.Lock()
        self._read_workers: list[ReadWorker] = []
        self._table: UcxRegionTable | ActiveTable | None = None
        self._regions: set[UcxRegion] = set()

    def _read_worker(self, number: int = 0) -> ReadWorker:
        """The read worker `number`, made on first use. Worker 0 has the table of exposed regions."""
        with self._making:
            self._check_open()
            while len(self._read_workers) <= number:
                permit_peers()
                self._read_workers.append(ReadWorker(Transports.choose(one_host=True)))
            return self._read_workers[number]

    # -- exposing

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> UcxRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        memory = ExposedMemory(tensor)
        lane = self._read_worker()
        with lane.lock:
            worker, messages = lane.worker, lane.messages
            if self._table is None:
                self._table = (
                    UcxRegionTable(worker, this_process())
                    if messages is None
                    else ActiveTable(messages, worker, this_process())
                )
            region = UcxRegion(self, memory, self._table.expose(memory, writable))
            self._regions.add(region)
        return region

    def retract(self, region: UcxRegion) -> None:
        """Invalidate the row of a region; free row and tensor once no process writes to it. Called once for each."""
        lane = self._read_workers[0]
        with lane.lock:
            table = self._table
            if table is None:
                return
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._release)
            for region in list(self._regions):
                stack.callback(region.close)

    def _release(self) -> None:
        with self._making:
            for lane in reversed(self._read_workers):
                lane.close(self._drop_table if lane is self._read_workers[0] else lambda: None)

    def _drop_table(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.close()
