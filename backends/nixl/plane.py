"""The memory plane of NIXL: reads and writes memory of another process where it lies.

The owner lists exposed memory in its `region_table`, which NIXL reads like any other memory: a reader that finds the
region's generation there after its copy has copied from that very region. On one host (the default, `posix,cma,self`)
the kernel copies between the two tensors, and the owner may be busy or stopped. With UCX_TLS set to transports that
cross hosts, for example "tcp,self", a thread of NIXL's answers for the owner, which may be busy but not stopped;
processes of one host still map what lies in mappable memory. Bytes
then pass through memory of the plane, so those of a read that timed out never reach the user's.

Writers hold a kernel lock on the region's row, which `close` waits for and which ends with its process. NIXL has no
atomics to do so from another host: writing there is `Unsupported`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch
from msgspec.structs import replace

from holdfast.backends.common import region_table
from holdfast.backends.common.block_copy import HeldUntil, TableRegion, check_size, contiguous_address
from holdfast.backends.common.mappable_plane import MappablePlane, place_of
from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.common.region_table import RegionTable, held_open, open_table, slot_address
from holdfast.backends.nixl.address import NixlAddress, packed
from holdfast.backends.nixl.agent import NixlAgent, Registered, Transfer
from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.system import forks
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.liveness import Liveness, this_host, this_process

BLOCK_BYTES = 4 << 20
"""Bytes between two checks of deadline and generation."""
STAGE_BYTES = 64 << 10
"""Up to this size, copying through registered memory costs less than registering the user's."""
REMEMBERED = 256
"""The number of remote regions that a plane caches."""


def open_plane() -> NixlPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return NixlPlane()


class NixlRegion(TableRegion):
    """See `TableRegion`."""

    def __init__(
        self, plane: NixlPlane, memory: ExposedMemory, registered: Registered | None, address: NixlAddress
    ) -> None:
        super().__init__(Handle(plane.name, address.encode(), memory.nbytes), memory, plane.retract)
        self.registered, self.slot = registered, region_table.TableAddress.decode(address.place).slot


class _RemoteRegion:
    """A region of another process: the connection, the words in its table, and whether its process lives."""

    def __init__(
        self, address: NixlAddress, place: region_table.TableAddress, stage: Registered, agent: NixlAgent
    ) -> None:
        self.address, self.place = address, place
        self.here = place.owner.host == this_host()
        self._liveness = Liveness([place.owner], rank=-1)
        self.alive()
        self._stage, self._agent = stage, agent
        self._row = slot_address(address.table, place.slot)
        self._word = ctypes.c_uint64.from_address(stage.address)
        self._look: Transfer | None = None

    def gone(self) -> RegionGone:
        return RegionGone(f"process {self.place.owner.pid}, which exposed this region, is gone")

    def alive(self) -> None:
        """Raise `RegionGone` once the process is known to be gone."""
        if self._liveness.dead():
            raise self.gone()

    def suspect(self) -> None:
        """Raise `RegionGone` if the process or its table is gone: a transfer to missing memory never ends."""
        self.alive()
        if self.here:
            with open_table("nixl", self.place):
                pass

    def check(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        if self._look is None:
            self._look = self._agent.prepare("READ", self._stage.address, self._row, 8, self.address.agent)
        self._agent.run(self._look, deadline, "memory access", self.suspect, self)
        self.alive()
        if self._word.value != self.place.generation:
            pid = self.place.owner.pid
            raise RegionGone(f"process {pid} closed the region; what was read of it must not be used")

    def close(self) -> None:
        if self._look is not None:
            self._agent.release(self._look)
            self._look = None
        self._liveness.close()


class NixlPlane(MappablePlane):
    """See the module. A forked child that uses its parent's plane has one without regions of its own."""

    name = "nixl"

    def __init__(self) -> None:
        super().__init__()
        self._begin()
        forks.reset_in_children(self)

    def reset_in_child(self) -> None:
        forks.never_destroy((self._agent, self._remote))  # destroying them would free resources of the parent
        if self._table is not None:
            self._table.close()
        self._begin()

    def _begin(self) -> None:
        self._begin_mapping()
        self._lock = threading.RLock()
        self._agent: NixlAgent | None = None
        self._table: RegionTable | None = None
        self._table_memory: Registered | None = None
        self._remote: dict[Handle, _RemoteRegion] = {}
        self._stage_memory: torch.Tensor | None = None
        self._stage: Registered | None = None

    def _started(self) -> NixlAgent:
        """The agent, made on first use. The lock is held."""
        if self._agent is None:
            permit_peers()
            self._agent = NixlAgent()
        return self._agent

    # -- exposing

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> NixlRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        memory = ExposedMemory(tensor)
        with self._lock:
            agent = self._started()
            if self._table is None or self._table_memory is None:
                self._table = RegionTable(this_process())
                self._table_memory = agent.register(*self._table.memory)
            registered = agent.register(memory.address, memory.nbytes) if memory.nbytes else None
            place = self._table.fill(memory.address, memory.nbytes, writable)
            place = replace(place, memory=place_of(memory.held))
            region = NixlRegion(
                self,
                memory,
                registered,
                NixlAddress(
                    place.encode(),
                    self._table_memory.address,
                    memory.address,
                    memory.nbytes,
                    writable,
                    agent.name,
                    packed(agent.describe(self._table_memory, *([registered] if registered else []))),
                ),
            )
            self._regions.add(region)
        return region

    def retract(self, region: NixlRegion) -> None:
        """Invalidate the row of a region; free row and tensor once no process writes to it. Called once for each."""
        with self._lock:
            table, agent = self._table, self._agent
            if table is None or agent is None:
                return
            written = table.invalidate(region.slot)
        if written:
            table.wait_for_writers(region.slot)
        with self._lock:
            if region.registered is not None:
                agent.deregister(region.registered)
            table.free(region.slot)
            self._regions.discard(region)

    def _place(self, handle: Handle) -> region_table.TableAddress:
        return NixlAddress.decode(handle.address)[1]

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
        for start in range(0, nbytes, BLOCK_BYTES) or (0,):
            with HeldUntil(self._lock, deadline, look):
                look()
                self._move(handle, address + start, offset + start, min(BLOCK_BYTES, nbytes - start), deadline, writing)

    def _move(self, handle: Handle, address: int, offset: int, nbytes: int, deadline: float, writing: bool) -> None:
        """Move one block. The lock is held."""
        if self._stage is None and self._remote:  # a read timed out: the known regions go, before one is used
            self._staging(STAGE_BYTES if self._started().local else BLOCK_BYTES)
        region = self._remote.get(handle) or self._find(handle)
        try:
            region.alive()
            if writing:
                self._push(region, address, offset, nbytes, deadline)
            else:
                if nbytes:
                    self._transfer(region, address, offset, nbytes, deadline, writing=False)
                region.check(deadline)
        except (RegionGone, OpTimeout):
            self._forget(region)
            raise

    def _push(self, region: _RemoteRegion, address: int, offset: int, nbytes: int, deadline: float) -> None:
        """Write a block while `close` of the owner waits."""
        if not region.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        if not region.here:
            raise Unsupported("writing to memory of another host over nixl", "let its owner read, or use ucx")
        with open_table(self.name, region.place) as (descriptor, _), held_open(descriptor, region.place.slot, deadline):
            region.check(deadline)
            if nbytes:
                self._transfer(region, address, offset, nbytes, deadline, writing=True)
            region.check(deadline)

    def _transfer(
        self, region: _RemoteRegion, address: int, offset: int, nbytes: int, deadline: float, writing: bool
    ) -> None:
        agent = self._started()
        there, name = region.address.memory + offset, region.address.agent
        op = "memory write" if writing else "memory read"
        direct = agent.local and nbytes > STAGE_BYTES
        memory = agent.register(address, nbytes) if direct else self._staging(nbytes)
        here = memory.address if direct else memory.address + 8
        if writing and not direct:
            ctypes.memmove(here, address, nbytes)
        transfer = agent.prepare("WRITE" if writing else "READ", here, there, nbytes, name)
        try:
            agent.run(transfer, deadline, op, region.suspect, self._stage_memory)
        except (RegionGone, OpTimeout):
            self._stage = None  # the transfer may still write to it
            raise
        else:
            if not writing and not direct:
                ctypes.memmove(address, here, nbytes)
            agent.release(transfer)
        finally:
            if direct:
                agent.deregister(memory)

    def _staging(self, nbytes: int) -> Registered:
        """Registered memory of the plane: a word for generations, and room for `nbytes`."""
        if self._stage is None or self._stage.nbytes < nbytes + 8:
            for region in list(self._remote.values()):
                self._forget(region)
            self._stage_memory = torch.empty(max(nbytes, STAGE_BYTES) + 8, dtype=torch.uint8, device="cpu")
            self._stage = self._started().register(self._stage_memory.data_ptr(), self._stage_memory.nbytes)
        return self._stage

    def _find(self, handle: Handle) -> _RemoteRegion:
        address, place, metadata = NixlAddress.decode(handle.address)
        check_size(handle, address.nbytes)
        agent = self._started()
        if agent.local and place.owner.host != this_host():
            raise Unsupported(
                f"reaching process {place.owner.pid} of another host over {agent.tls}",
                "set UCX_TLS=tcp,self (or what your network has) for both processes",
            )
        if len(self._remote) >= REMEMBERED:
            for other in list(self._remote.values()):
                self._forget(other)
        region = _RemoteRegion(address, place, self._staging(STAGE_BYTES if agent.local else BLOCK_BYTES), agent)
        try:
            region.suspect()
            if address.agent != agent.name:
                agent.add_peer(metadata, address.agent)
        except BaseException:
            region.close()
            raise
        self._remote[handle] = region
        return region

    def _forget(self, region: _RemoteRegion) -> None:
        """Drop a cached region, and the connection that it uses."""
        agent = self._started()
        for handle, known in list(self._remote.items()):
            if known.address.agent == region.address.agent:
                del self._remote[handle]
                known.close()
        if region.address.agent != agent.name:
            agent.forget(region.address.agent)

    # -- the end

    def _release(self) -> None:
        with self._lock:
            for region in list(self._remote.values()):
                self._forget(region)
            agent, self._agent = self._agent, None
            for memory in (self._stage, self._table_memory):
                if memory is not None and agent is not None:
                    agent.deregister(memory)
            self._stage = self._table_memory = None
            table, self._table = self._table, None
            if table is not None:
                table.close()
