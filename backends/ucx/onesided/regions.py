"""Memory that this process exposes for UCX to read and write, and the table of its open regions.

A row of the table is two words: the region's generation, which is never used twice and is 0 once the region is closed,
and the process that is writing to it. The table is memory allocated by UCX, so processes of one host load from it
directly. A reader that finds the generation after its copy has copied from that very region.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from typing import Any

import msgspec

from holdfast.backends.common.block_copy import sealed, unsealed
from holdfast.backends.common.region_table import TableAddress
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms._native import fence
from holdfast.comms.errors import CorruptData, OpTimeout, Unsupported
from holdfast.comms.system.cpu_wait import Wait, words_at
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import start_time

ROWS = 1 << 16
ROW_BYTES = 16
WRITER_SECONDS = 2.0
"""How long `wait_for_writer` waits for a writer in the middle of a block."""


class UcxAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address in a handle of the ucx plane: the owner, how to connect, the table and the memory.

    `mapping` is the row of a region that processes of the host can map: descriptor and id of the owner's `RegionTable`,
    slot, generation, the region's memfd and its first byte there.
    """

    owner: Peer
    worker: bytes
    table_key: bytes
    row: int
    generation: int
    key: bytes
    memory: int
    nbytes: int
    writable: bool
    mapping: tuple[int, int, int, int, int, int] | None = None

    @property
    def place(self) -> TableAddress | None:
        """The row of a region that can be mapped; None for others."""
        return None if self.mapping is None else TableAddress(self.owner, *self.mapping[:4], self.mapping[4:])

    @property
    def by_messages(self) -> bool:
        """Whether the owner carries out reads and writes by active messages, since UCX only emulates them."""
        return not self.key

    def encode(self) -> bytes:
        return sealed(msgspec.msgpack.encode(self))

    @staticmethod
    def decode(data: bytes) -> UcxAddress:
        """Decode an address. Raises `CorruptData` for anything but what `encode` made: libucp would trust it."""
        body = unsealed(data)
        try:
            return _addresses.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptData(f"not the address of a region: {error}") from error


_addresses = msgspec.msgpack.Decoder(UcxAddress)


def writer_token(process: Peer) -> int:
    """The number of a process in a row that it writes under: never 0."""
    return (process.started << 22 | process.pid) & (1 << 63) - 1


def writer_lives(token: int) -> bool:
    """Whether a process of this host with this token is running."""
    pid = token & (1 << 22) - 1
    try:
        return token == writer_token(Peer("", pid, start_time(pid)))
    except ProcessLookupError:
        return False


class Mapping:
    """Memory registered with UCX until `close`: a tensor's, or (without an address) memory that UCX allocates."""

    def __init__(self, worker: UcxWorker, nbytes: int, address: int | None) -> None:
        self._worker = worker
        lib, ffi = worker.lib, worker.lib.ffi
        params = ffi.new("ucp_mem_map_params_t *")
        params.length = nbytes
        if address is None:
            params.field_mask, params.flags = 1 << 1 | 1 << 2, libucp.MEM_MAP_ALLOCATE
        else:
            params.field_mask, params.address = 1 << 0 | 1 << 1, ffi.cast("void *", address)
        memory = ffi.new("ucp_mem_h *")
        lib.check(lib.call.ucp_mem_map(worker.context, params, memory), "registering memory")
        self._memory: Any = memory[0]
        try:
            attributes = ffi.new("ucp_mem_attr_t *", {"field_mask": 1})
            lib.check(lib.call.ucp_mem_query(self._memory, attributes), "asking where memory is")
            self.address = int(ffi.cast("uintptr_t", attributes.address))
            self.key = self._packed_key()
        except BaseException:
            self.close()
            raise

    def _packed_key(self) -> bytes:
        lib, ffi = self._worker.lib, self._worker.lib.ffi
        buffer, size = ffi.new("void **"), ffi.new("size_t *")
        lib.check(lib.call.ucp_rkey_pack(self._worker.context, self._memory, buffer, size), "packing a key")
        try:
            return bytes(ffi.buffer(buffer[0], size[0]))
        finally:
            lib.call.ucp_rkey_buffer_release(buffer[0])

    def close(self) -> None:
        self._worker.lib.call.ucp_mem_unmap(self._worker.context, self._memory)


class UcxRegionTable:
    """The rows of this process. Its plane's lock is held around each call but `wait_for_writer`."""

    def __init__(self, worker: UcxWorker, owner: Peer) -> None:
        self._worker, self._owner = worker, owner
        self._exposed: dict[int, Mapping] = {}
        self._mapping = Mapping(worker, ROWS * ROW_BYTES, None)
        ctypes.memset(self._mapping.address, 0, ROWS * ROW_BYTES)
        self._words = words_at(self._mapping.address, ROWS * ROW_BYTES // 8)
        self._generation = secrets.randbits(62)
        self._used = 0
        self._free: list[int] = []

    def expose(self, memory: ExposedMemory, writable: bool) -> UcxAddress:
        """Register memory and enter it. Raises `Unsupported` when too many regions are open already."""
        if not self._free and self._used == ROWS:
            raise Unsupported(f"more than {ROWS} exposed regions in one process", "close some of them")
        nbytes = memory.nbytes
        mapping = Mapping(self._worker, nbytes, memory.address) if nbytes else Mapping(self._worker, 8, None)
        if self._free:
            row = self._free.pop()
        else:
            row, self._used = self._used, self._used + 1
        self._exposed[row] = mapping
        self._generation += 1
        self._words[2 * row] = self._generation
        return UcxAddress(
            self._owner,
            self._worker.address,
            self._mapping.key,
            self._mapping.address + row * ROW_BYTES,
            self._generation,
            mapping.key,
            mapping.address,
            nbytes,
            writable,
        )

    def invalidate(self, address: UcxAddress) -> None:
        """Invalidate a region: no read or write of it succeeds any more."""
        self._words[self._index(address)] = 0
        fence()  # a writer sets its word, then reads the generation: one of the two sees the other

    def wait_for_writer(self, address: UcxAddress) -> None:
        """Wait until no process writes to an invalidated region. Raises `OpTimeout`."""
        index = self._index(address) + 1

        def left() -> bool:
            if (token := self._words[index]) and not writer_lives(token):
                self._words[index] = 0
            return not self._words[index]

        Wait(yields=0).until(
            left,
            lambda: None,
            time.monotonic() + WRITER_SECONDS,
            lambda waited: OpTimeout("closing a region that another process is writing to", index // 2, waited),
        )

    def free(self, address: UcxAddress) -> None:
        """Release the memory and its row."""
        row = self._index(address) // 2
        self._exposed.pop(row).close()
        self._free.append(row)

    def _index(self, address: UcxAddress) -> int:
        return (address.row - self._mapping.address) // 8

    def close(self) -> None:
        self._mapping.close()
