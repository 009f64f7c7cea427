"""The memory plane of UCX: get and put on memory of another process where it lies.

On one host (the default) it is that of the host: the kernel copies between the two tensors, and the owner takes no
part. With UCX_TLS set to transports that cross hosts, for example "tcp,self", the owner's progress thread answers: see
`onesided`. Over either, processes of the host map what lies in mappable memory of `empty`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import asdict

from holdfast.backends.common.host_plane import BlockCopy, HostPlane, Withdraw, read_only
from holdfast.backends.common.process_memory import permit_peers
from holdfast.backends.common.region_table import TableAddress, check_size, forged
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided import UcxChannel
from holdfast.backends.ucx.worker import ProgressThread, Transports, UcxWorker
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.requests import GONE, Exposed, Owner, Requests
from holdfast.comms.system import forks
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.transport.liveness import RegionOwner, region_closed

ATTEMPTS = 3
"""The number of attempts for a block, each over a new connection."""
REMEMBERED = 256
"""The number of remote regions that a plane caches."""


class RemoteAddress(TableAddress, frozen=True, array_like=True):
    """The address of a region: its place in the owner's table, and the worker or agent that answers, if any."""

    nbytes: int
    peer: bytes

    def check_reachable(self, handle: Handle, over: Transports) -> None:
        """Raise `CorruptData` if a handle has another size, and `Unsupported` if no peer answers."""
        check_size(handle, self.nbytes)
        if not self.peer:
            raise Unsupported(f"reaching process {self.owner.pid} over {over.tls}", "set the same UCX_TLS for both")


class UcxAddress(RemoteAddress, frozen=True, array_like=True):
    """The address of a region; `peer` is the address of the owner's worker."""

    writable: bool


class OwnerUnreachable(RegionGone):
    """The connection broke, though the owner lives as far as is known: a new connection may still find the region."""


class _Connection(RegionOwner):
    """A connection to a process that exposes memory."""

    _keys = itertools.count(1)

    def __init__(self, worker: UcxWorker, address: UcxAddress) -> None:
        self.broken = ""
        super().__init__(address.owner)
        self.peer, self.key, self._worker = address.peer, next(self._keys), worker
        try:
            self.endpoint: Any = worker.connect(address.peer, self.key)
        except libucp.UcxError as error:
            super().close()
            raise RegionGone(f"UCX cannot reach process {self.pid}, which exposed this region: {error}") from error

    def check(self) -> None:
        super().check()
        if self.broken:
            raise OwnerUnreachable(f"the connection to process {self.pid} broke: {self.broken}")

    def close(self) -> None:
        self._worker.disconnect(self.endpoint)
        super().close()


class _Region(Owner):
    """A region of another process, as that answers for it."""

    def __init__(self, connection: _Connection, number: int, writable: bool, requests: Requests) -> None:
        self.connection, self.to = connection, connection.endpoint
        self._number, self._writable, self._requests = number, writable, requests

    def move(self, block: BlockCopy) -> None:
        """Copy one block between memory of this process and the region. Raises `RegionGone`, `OpTimeout`."""
        memory, deadline = (block.address, block.nbytes), block.deadline
        if not block.writing:
            self._requests.read(self, self._number, block.offset, memory, block.tensor, deadline, "memory read")
        elif self._writable:
            self._requests.write(self, self._number, block.offset, memory, block.tensor, deadline, "memory write")
        else:
            raise read_only()

    def check_live(self) -> None:
        self.connection.check()
        if self.to in self._requests.channel.broken:
            raise OwnerUnreachable(f"process {self.connection.pid} could not be asked; its connection broke")

    def error(self, outcome: int, op: str) -> HoldfastError:
        pid = self.connection.pid
        if outcome == GONE:
            return region_closed(pid)
        return forged(f"process {pid} refuses a {op}, since its region has no such bytes")

    def late(self, op: str, seconds: float) -> OpTimeout:
        return OpTimeout(op, 0, seconds)


class _Messenger:
    """The worker of a plane between hosts: it asks the owners of regions, and answers for those of this process.

    The worker is used with `lock` held.
    """

    def __init__(self, over: Transports) -> None:
        self.lock = threading.RLock()
        permit_peers()
        self.worker = UcxWorker(libucp.FEATURE_AM, over, self._note_failure)
        self.requests = Requests(partial(UcxChannel, self.worker, self.lock))
        self._connections: dict[bytes, _Connection] = {}
        self._found: dict[Handle, _Region] = {}
        self._progress = ProgressThread(self.worker, self.lock, eager=len(os.sched_getaffinity(0)) > 1)

    def move(self, block: BlockCopy) -> None:
        """Move one block, over a new connection if the existing one is broken."""
        for attempt in range(1, ATTEMPTS + 1):
            region = None
            try:
                region = self._found.get(block.handle) or self._find(block.handle)
                region.move(block)
            except (RegionGone, OpTimeout) as error:
                if region is not None:
                    self._forget(region.connection)
                if attempt == ATTEMPTS or not isinstance(error, OwnerUnreachable):
                    raise
            else:
                return

    def _find(self, handle: Handle) -> _Region:
        address = UcxAddress.decode(handle.address)
        address.check_reachable(handle, self.worker.over)
        connection = self._connections.get(address.peer)
        if connection is None:
            connection = self._connections[address.peer] = _Connection(self.worker, address)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        region = _Region(connection, address.generation, address.writable, self.requests)
        self._found[handle] = region
        return region

    def _forget(self, connection: _Connection) -> None:
        """Drop the connection to an owner, which may be broken, and its cached regions."""
        self._found = {handle: region for handle, region in self._found.items() if region.connection is not connection}
        if self._connections.pop(connection.peer, None) is not None:
            self.requests.channel.broken.discard(connection.endpoint)
            connection.close()

    def _note_failure(self, key: int, why: str) -> None:
        """Note a broken connection; called by UCX during progress."""
        for connection in self._connections.values():
            if connection.key == key:
                connection.broken = why

    def close(self) -> None:
        self._progress.close()
        with self.lock:
            for connection in list(self._connections.values()):
                self._forget(connection)
            self.worker.close()


class NetworkPlane(HostPlane):
    """The plane of a host; if UCX_TLS crosses hosts, one that reaches them by a library.

    A forked child that uses its parent's plane has one without regions of its own.
    """

    access: ClassVar[type[Any]]
    """Starts the library. What it returns has a `lock`, to be held for `move(block)`, and `close()`."""
    block_bytes: ClassVar[int]
    """Bytes between two checks of the deadline and of a closed plane."""
    writes: ClassVar[bool]
    """Whether the library also writes. If not, only regions of this host are written to."""

    def _begin(self) -> None:
        super()._begin()
        self._over = Transports.choose(one_host=True)
        self._opened: Any = None

    def reset_in_child(self) -> None:
        forks.never_destroy((self._opened, self._regions))  # destroying them would free resources of the parent
        super().reset_in_child()

    def _access(self) -> Any:
        """What reaches other processes, made on first use."""
        with self._lock:
            self._check_open()
            if self._opened is None:
                self._opened = self.access(self._over)
            return self._opened

    def _in_blocks(self, copy: BlockCopy) -> None:
        if self._over.local or (copy.writing and not self.writes):
            super()._in_blocks(copy)
            return
        access = self._access()
        for block in copy.blocks(self.block_bytes):
            while not access.lock.acquire(timeout=max(block.deadline - time.monotonic(), 0.001)):
                block.look()  # another copy may hold the lock for long
            try:
                block.look()
                access.move(block)
            finally:
                access.lock.release()

    def _release(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
        super()._release()


class UcxPlane(NetworkPlane):
    """See the module."""

    name = "ucx"
    beyond_host: ClassVar[str] = "set UCX_TLS=tcp,self (or what your network has) for both processes"
    address = UcxAddress
    access = _Messenger
    block_bytes = 16 << 20
    writes = True

    def _offer(self, place: TableAddress, memory: ExposedMemory, writable: bool) -> tuple[bytes, Withdraw]:
        worker, withdraw = b"", (lambda: None)
        if not self._over.local:
            messenger: _Messenger = self._access()
            worker, withdraw = messenger.worker.address, partial(messenger.requests.withdraw, place.generation)
            messenger.requests.expose(place.generation, Exposed(memory, writable))
        address = UcxAddress(**asdict(place), nbytes=memory.nbytes, peer=worker, writable=writable)
        return address.encode(), withdraw
