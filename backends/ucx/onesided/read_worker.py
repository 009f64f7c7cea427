"""A worker of a memory plane, and the regions of other processes that it has found.

libucp takes one call at a time on a worker, and where the kernel copies, a call is the whole copy. So a plane that
reads with several threads gives each thread its own read worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

from holdfast.backends.common.block_copy import HeldUntil, check_size
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided.channel import UcxChannel
from holdfast.backends.ucx.onesided.message_region import MessageRegion
from holdfast.backends.ucx.onesided.regions import UcxAddress
from holdfast.backends.ucx.onesided.remote import Owner, OwnerUnreachable, RemoteRegion
from holdfast.backends.ucx.progress import ProgressThread
from holdfast.backends.ucx.worker import Transports, UcxWorker
from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.requests import Requests
from holdfast.comms.transport.liveness import this_host

BLOCK_BYTES, FAR_BLOCK_BYTES = 2 << 20, 16 << 20
"""Bytes between two checks of the generation, for the kernel's copies and over a network."""
ATTEMPTS = 3
"""The number of attempts for a block, each over a new connection."""
REMEMBERED = 256
"""The number of remote regions for which a read worker caches keys."""


class ReadWorker:
    """See the module. The worker is used with `lock` held."""

    def __init__(self, over: Transports) -> None:
        self.lock = threading.RLock()
        self.requests: Requests | None = None
        self._block = BLOCK_BYTES if over.local else FAR_BLOCK_BYTES
        self._progress: ProgressThread | None = None
        self._owners: dict[bytes, Owner] = {}
        self._found: dict[Handle, RemoteRegion | MessageRegion] = {}
        if over.emulated:
            self.worker = UcxWorker(libucp.FEATURE_AM, over, self._note_failure)
            self.requests = Requests(partial(UcxChannel, self.worker, self.lock))
        else:
            self.worker = UcxWorker(libucp.FEATURE_RMA | libucp.FEATURE_AMO64, over)
        if not over.local:
            self._progress = ProgressThread(self.worker, self.lock, eager=len(os.sched_getaffinity(0)) > 1)

    def copy(
        self,
        handle: Handle,
        address: int,
        offset: int,
        nbytes: int,
        deadline: float,
        writing: bool,
        look: Callable[[], None],
    ) -> None:
        """Copy between memory at `address` and a region, block by block. `look()`, called before each, may raise."""
        for start in range(0, nbytes, self._block) or (0,):
            with HeldUntil(self.lock, deadline, look):
                look()
                self._move(handle, address + start, offset + start, min(self._block, nbytes - start), deadline, writing)

    def _move(self, handle: Handle, address: int, offset: int, nbytes: int, deadline: float, writing: bool) -> None:
        """Move one block, over a new connection if the existing one is broken."""
        for attempt in range(1, ATTEMPTS + 1):
            region = None
            try:
                region = self._found.get(handle) or self._find(handle, deadline)
                (region.push if writing else region.pull)(address, offset, nbytes, deadline)
            except (RegionGone, OpTimeout) as error:
                if region is not None:
                    self._forget(region.owner)
                if attempt == ATTEMPTS or not isinstance(error, OwnerUnreachable):
                    raise
            else:
                return

    def _find(self, handle: Handle, deadline: float) -> RemoteRegion | MessageRegion:
        address = UcxAddress.decode(handle.address)
        check_size(handle, address.nbytes)
        worker = self.worker
        if worker.over.emulated != address.by_messages:
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
        if len(self._found) >= REMEMBERED:
            self._drop_keys(list(self._found))
        try:
            region: RemoteRegion | MessageRegion
            if self.requests is None:
                region = RemoteRegion(owner, address)
            else:
                region = MessageRegion(owner, address, self.requests)
            region.check(deadline)
        except (RegionGone, OpTimeout):
            self._forget(owner)
            raise
        except libucp.UcxError as error:
            self._forget(owner)
            raise OwnerUnreachable(f"process {owner.pid} cannot be reached any more: {error}") from error
        self._found[handle] = region
        return region

    def _forget(self, owner: Owner) -> None:
        """Drop the connection to an owner, which may be broken, and its cached regions."""
        self._drop_keys([handle for handle, region in self._found.items() if region.owner is owner])
        for address, known in list(self._owners.items()):
            if known is owner:
                del self._owners[address]
                if self.requests is not None:
                    self.requests.channel.broken.discard(owner.endpoint)
                owner.close()

    def _note_failure(self, key: int, why: str) -> None:
        """Note a broken connection; called by UCX during progress."""
        for owner in self._owners.values():
            if owner.key == key:
                owner.broken = why

    def _drop_keys(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._found.pop(handle).close()

    def close(self, and_then: Callable[[], None] = lambda: None) -> None:
        """Release everything; `and_then` is called when no connection is left, before the worker is closed."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        with self.lock:
            for owner in list(self._owners.values()):
                self._forget(owner)
            and_then()
            self.worker.close()
