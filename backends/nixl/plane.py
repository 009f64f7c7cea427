"""The memory plane of NIXL: reads memory of a process on another host where it lies.

On one host (the default) it is that of the host. With UCX_TLS set to transports that cross hosts, for example
"tcp,self", NIXL reads, also between processes of one host: a thread of its own answers for the owner, which may be busy
but not stopped. It reads the owner's `region_table` like any other memory: a reader that finds the region's generation
there after its copy has copied from that very region. Bytes pass through memory of the plane, so those of a read that
timed out never reach the user's.

NIXL has no atomics with which the owner's `close` could wait for a writer on another host: writing there is
`Unsupported`.
"""

from __future__ import annotations

import ctypes
import zlib
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch

from holdfast.backends.common.block_copy import BlockCopy, HeldUntil, SealedAddress, check_size, forged
from holdfast.backends.common.host_plane import HostPlane, Withdraw
from holdfast.backends.common.region_table import TableAddress, open_table, slot_address
from holdfast.backends.nixl.agent import NixlAgent
from holdfast.backends.ucx.worker import Transports
from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.region_owner import RegionOwner, closed
from holdfast.comms.system import forks
from holdfast.comms.tensors.exposed import ExposedMemory

BLOCK_BYTES = 4 << 20
"""Bytes between two checks of deadline and generation."""
REMEMBERED = 256
"""The number of remote regions that a plane caches."""
_WORD = 8
"""Bytes of a generation, before those of a block, in the memory through which they pass."""
_MOST_METADATA_BYTES = 1 << 16


def open_plane() -> NixlPlane:
    """A memory plane of this process. What it exposes is open until it is closed."""
    return NixlPlane()


class NixlAddress(SealedAddress, frozen=True, array_like=True):
    """The address of a region, in under 512 bytes: its place, and where the owner has its table and the memory.

    `metadata` is NIXL's, of the agent `agent` with these two memories; it compresses well. "" on one host.
    """

    place: bytes
    table: int
    memory: int
    nbytes: int
    agent: str = ""
    metadata: bytes = b""

    def unpacked(self) -> bytes:
        """The metadata as NIXL takes it. Raises `CorruptData`."""
        unpacker = zlib.decompressobj()
        try:
            metadata = unpacker.decompress(self.metadata, _MOST_METADATA_BYTES)
        except zlib.error as error:
            raise forged(error) from error
        if not unpacker.eof:
            raise forged("what describes its agent is too long")
        return metadata


class _RemoteRegion(RegionOwner):
    """A region of another process, and whether that lives."""

    def __init__(self, address: NixlAddress, place: TableAddress) -> None:
        super().__init__(place.owner)
        self.address, self.place = address, place
        self.row = slot_address(address.table, place.slot)
        self.transfer: Any = None
        """Reads the generation in that row. NIXL takes as long to prepare a transfer as to carry it out."""

    def close(self) -> None:
        self.transfer = None  # while NIXL still knows the other agent
        super().close()

    def look(self) -> None:
        """Raise `RegionGone` if the process or its table is gone: a transfer to missing memory never ends."""
        self.check()
        if self.here:
            with open_table("nixl", self.place):
                pass


class NixlPlane(HostPlane):
    """See the module. A forked child that uses its parent's plane has one without regions of its own."""

    name = "nixl"
    beyond_host: ClassVar[str] = (
        "to read, set UCX_TLS=tcp,self (or what your network has) for both processes; to write, let its owner read, or "
        "use ucx"
    )

    def reset_in_child(self) -> None:
        forks.never_destroy((self._agent, self._remote))  # destroying them would free resources of the parent
        super().reset_in_child()

    def _begin(self) -> None:
        super()._begin()
        self._over = Transports.choose(one_host=True).connecting_in_background()
        self._agent: NixlAgent | None = None
        self._registered: list[Any] = []
        self._stage: torch.Tensor | None = None
        self._remote: dict[Handle, _RemoteRegion] = {}

    def _started(self) -> NixlAgent:
        """The agent, made on first use. The lock is held."""
        if self._agent is None:
            self._agent = NixlAgent(self._over)
        return self._agent

    def _offer(self, place: TableAddress, memory: ExposedMemory, writable: bool) -> tuple[bytes, Withdraw]:
        table, exposed = self._own_table().memory, (memory.address, memory.nbytes)
        address = NixlAddress(place.encode(), table[0], *exposed)
        if self._over.local:
            return address.encode(), lambda: None
        agent = self._started()
        if not self._registered:
            self._registered.append(agent.register(*table))
        registered = agent.register(*exposed) if memory.nbytes else None
        metadata = agent.describe(table, *[exposed] if memory.nbytes else [])
        address = msgspec.structs.replace(address, agent=agent.name, metadata=zlib.compress(metadata, 9))
        return address.encode(), (lambda: None) if registered is None else partial(agent.deregister, registered)

    def _place(self, handle: Handle) -> TableAddress:
        return TableAddress.decode(NixlAddress.decode(handle.address).place)

    def _in_blocks(self, copy: BlockCopy) -> None:
        if self._over.local or copy.writing:
            super()._in_blocks(copy)
            return
        for block in copy.blocks(BLOCK_BYTES):
            with HeldUntil(self._lock, block):
                block.look()
                region = self._remote.get(block.handle) or self._find(block.handle)
                try:
                    self._read(region, block)
                except (RegionGone, OpTimeout):
                    self._forget(region)
                    raise

    def _read(self, region: _RemoteRegion, block: BlockCopy) -> None:
        """Read a block, and then its region's generation. The lock is held."""
        region.look()
        agent, address = self._started(), region.address
        if self._stage is None:
            self._stage = torch.empty(_WORD + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
            self._registered.append(agent.register(self._stage.data_ptr(), self._stage.nbytes))
        word = self._stage.data_ptr()
        try:
            if block.nbytes:
                bytes_of_block = agent.prepare(address.agent, address.memory + block.offset, word + _WORD, block.nbytes)
                agent.run(bytes_of_block, block.deadline, region.look, self._stage)
            if region.transfer is None:
                region.transfer = agent.prepare(address.agent, region.row, word, _WORD)
            agent.run(region.transfer, block.deadline, region.look, self._stage)
        except (RegionGone, OpTimeout):
            self._stage = None  # a transfer may still write to it
            for known in self._remote.values():
                known.transfer = None
            raise
        if ctypes.c_uint64.from_address(word).value != region.place.generation:
            raise closed(region.pid)
        ctypes.memmove(block.address, word + _WORD, block.nbytes)

    def _find(self, handle: Handle) -> _RemoteRegion:
        address, agent = NixlAddress.decode(handle.address), self._started()
        place = TableAddress.decode(address.place)
        check_size(handle, address.nbytes)
        if not address.agent:
            raise Unsupported(
                f"reaching process {place.owner.pid} over {self._over.tls}", "set the same UCX_TLS for both"
            )
        metadata = address.unpacked()
        if len(self._remote) >= REMEMBERED:
            for other in list(self._remote.values()):
                self._forget(other)
        region = _RemoteRegion(address, place)
        try:
            if address.agent != agent.name:
                agent.add_peer(metadata, address.agent)
        except BaseException:
            region.close()
            raise
        self._remote[handle] = region
        return region

    def _forget(self, region: _RemoteRegion) -> None:
        """Drop the connection to a region's owner, and its cached regions."""
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
            agent, self._agent, self._stage = self._agent, None, None
            while self._registered and agent is not None:
                agent.deregister(self._registered.pop())
        super()._release()
