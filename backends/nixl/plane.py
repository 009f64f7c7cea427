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
import zlib
from functools import partial

import msgspec
import torch

from holdfast.backends.common.block_copy import BlockCopy, HeldUntil, check_size, forged, sealed, unsealed
from holdfast.backends.common.host_plane import HostPlane, Withdraw
from holdfast.backends.common.region_table import TableAddress, held_open, open_table, slot_address
from holdfast.backends.nixl.agent import NixlAgent, Registered, Transfer
from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.region_owner import RegionOwner, closed
from holdfast.comms.system import forks
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.liveness import this_host

BLOCK_BYTES = 4 << 20
"""Bytes between two checks of deadline and generation."""
STAGE_BYTES = 64 << 10
"""Up to this size, copying through registered memory costs less than registering the user's."""
REMEMBERED = 256
"""The number of remote regions that a plane caches."""
_MOST_METADATA_BYTES = 1 << 16


def open_plane() -> NixlPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return NixlPlane()


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of a region, in under 512 bytes: table, place in it, memory and agent of the owner.

    `metadata` is NIXL's, of the agent `agent` with these two memories; it compresses well.
    """

    place: bytes
    table: int
    memory: int
    nbytes: int
    writable: bool
    agent: str
    metadata: bytes

    def encode(self) -> bytes:
        return sealed(msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> tuple[NixlAddress, TableAddress, bytes]:
        """Decode an address; returns it, its place in the table, and NIXL's metadata.

        Raises `CorruptData` for anything but what `encode` made: NIXL would trust it.
        """
        body = unsealed(data)
        try:
            address = _addresses.decode(body)
            unpacker = zlib.decompressobj()
            metadata = unpacker.decompress(address.metadata, _MOST_METADATA_BYTES)
        except (msgspec.DecodeError, UnicodeDecodeError, zlib.error) as error:
            raise forged(error) from error
        if not unpacker.eof:
            raise forged("what describes its agent is too long")
        return address, TableAddress.decode(address.place), metadata


_addresses = msgspec.msgpack.Decoder(NixlAddress)


class _RemoteRegion(RegionOwner):
    """A region of another process: the connection, the words in its table, and whether its process lives."""

    def __init__(self, address: NixlAddress, place: TableAddress, stage: Registered, agent: NixlAgent) -> None:
        super().__init__(place.owner)
        self.address, self.place = address, place
        self._stage, self._agent = stage, agent
        self._row = slot_address(address.table, place.slot)
        self._word = ctypes.c_uint64.from_address(stage.address)
        self._look: Transfer | None = None

    def suspect(self) -> None:
        """Raise `RegionGone` if the process or its table is gone: a transfer to missing memory never ends."""
        self.check()
        if self.here:
            with open_table("nixl", self.place):
                pass

    def check_open(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        if self._look is None:
            self._look = self._agent.prepare("READ", self._stage.address, self._row, 8, self.address.agent)
        self._agent.run(self._look, deadline, "memory access", self.suspect, self)
        self.check()
        if self._word.value != self.place.generation:
            raise closed(self.pid)

    def close(self) -> None:
        if self._look is not None:
            self._agent.release(self._look)
            self._look = None
        super().close()


class NixlPlane(HostPlane):
    """See the module. A forked child that uses its parent's plane has one without regions of its own."""

    name = "nixl"

    def reset_in_child(self) -> None:
        forks.never_destroy((self._agent, self._remote))  # destroying them would free resources of the parent
        super().reset_in_child()

    def _begin(self) -> None:
        super()._begin()
        self._agent: NixlAgent | None = None
        self._table_memory: Registered | None = None
        self._remote: dict[Handle, _RemoteRegion] = {}
        self._stage_memory: torch.Tensor | None = None
        self._stage: Registered | None = None

    def _started(self) -> NixlAgent:
        """The agent, made on first use. The lock is held."""
        if self._agent is None:
            self._agent = NixlAgent()
        return self._agent

    def _offer(self, place: TableAddress, memory: ExposedMemory, writable: bool) -> tuple[bytes, Withdraw]:
        agent = self._started()
        if self._table_memory is None:
            self._table_memory = agent.register(*self._own_table().memory)
        exposed = [agent.register(memory.address, memory.nbytes)] if memory.nbytes else []
        address = NixlAddress(
            place.encode(),
            self._table_memory.address,
            memory.address,
            memory.nbytes,
            writable,
            agent.name,
            zlib.compress(agent.describe(self._table_memory, *exposed), 9),
        )
        return address.encode(), partial(agent.deregister, *exposed) if exposed else lambda: None

    def _place(self, handle: Handle) -> TableAddress:
        return NixlAddress.decode(handle.address)[1]

    # -- reading and writing

    def _in_blocks(self, copy: BlockCopy) -> None:
        for block in copy.blocks(BLOCK_BYTES):
            with HeldUntil(self._lock, block):
                block.look()
                self._move(block)

    def _move(self, block: BlockCopy) -> None:
        """Move one block. The lock is held."""
        if self._stage is None and self._remote:  # a read timed out: the known regions go, before one is used
            self._staging(STAGE_BYTES if self._started().local else BLOCK_BYTES)
        region = self._remote.get(block.handle) or self._find(block.handle)
        try:
            region.check()
            if block.writing:
                self._push(region, block)
            else:
                if block.nbytes:
                    self._transfer(region, block)
                region.check_open(block.deadline)
        except (RegionGone, OpTimeout):
            self._forget(region)
            raise

    def _push(self, region: _RemoteRegion, block: BlockCopy) -> None:
        """Write a block while `close` of the owner waits."""
        if not region.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        if not region.here:
            raise Unsupported("writing to memory of another host over nixl", "let its owner read, or use ucx")
        place, deadline = region.place, block.deadline
        with open_table(self.name, place) as (descriptor, _), held_open(descriptor, place.slot, deadline):
            region.check_open(deadline)
            if block.nbytes:
                self._transfer(region, block)
            region.check_open(deadline)

    def _transfer(self, region: _RemoteRegion, block: BlockCopy) -> None:
        agent, address, nbytes, writing = self._started(), block.address, block.nbytes, block.writing
        there, name = region.address.memory + block.offset, region.address.agent
        op = "memory write" if writing else "memory read"
        direct = agent.local and nbytes > STAGE_BYTES
        memory = agent.register(address, nbytes) if direct else self._staging(nbytes)
        here = memory.address if direct else memory.address + 8
        if writing and not direct:
            ctypes.memmove(here, address, nbytes)
        transfer = agent.prepare("WRITE" if writing else "READ", here, there, nbytes, name)
        try:
            agent.run(transfer, block.deadline, op, region.suspect, self._stage_memory)
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
        super()._release()
