"""A region of another process: its memory, read and written through UCX, and its row in the owner's table.

Each call is made with the plane's lock held, and moves one block at most.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from typing import Any

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.regions import Address, writer_lives, writer_token
from holdfast.backends.ucx.worker import Worker
from holdfast.comms.errors import OpTimeout, RegionGone, Unsupported
from holdfast.comms.liveness import open_pidfd, this_host, this_process

_LOOK_SECONDS = 0.002
_LEAVE_SECONDS = 0.5


class ConnectionLost(RegionGone):
    """The connection broke, though the owner lives as far as is known: another may still find the region."""


class Owner:
    """A connection to a process that exposes memory. `here` says whether it is on this host."""

    def __init__(self, worker: Worker, address: Address) -> None:
        self.worker = worker
        self.pid, self.here = address.owner.pid, address.owner.host == this_host()
        self._pidfd: int | None = None
        self._poll = select.poll()
        if self.here:
            self._pidfd = open_pidfd(address.owner)
            if self._pidfd is None:
                raise RegionGone(f"process {self.pid}, which exposed this region, is gone")
            self._poll.register(self._pidfd, select.POLLIN)
        self.words = worker.lib.ffi.new("uint64_t[2]")
        self.words_at = int(worker.lib.ffi.cast("uintptr_t", self.words))
        try:
            self.endpoint: Any = worker.connect(address.worker, self.pid)
        except libucp.UcxError as error:
            self._close_pidfd()
            raise RegionGone(f"process {self.pid} cannot be reached: {error}") from error

    def alive(self) -> bool:
        """False once its process is known to be gone."""
        return not self.here or not self._poll.poll(0)

    def check(self) -> None:
        if not self.alive():
            raise RegionGone(f"process {self.pid}, which exposed this region, is gone")

    def unpack(self, key: bytes) -> Any:
        """The key to a registered memory of this owner."""
        lib, ffi = self.worker.lib, self.worker.lib.ffi
        made = ffi.new("ucp_rkey_h *")
        lib.check(lib.call.ucp_ep_rkey_unpack(self.endpoint, ffi.from_buffer(key), made), "unpacking a key")
        return made[0]

    def wait(self, request: int, deadline: float, op: str) -> None:
        """Progress until `request` is done. Raises `RegionGone` if it failed, `OpTimeout`.

        After an `OpTimeout` the request may still be carried out.
        """
        if not request:
            return
        lib, call, began = self.worker.lib, self.worker.lib.call, time.monotonic()
        if request > 0:
            turn = 0
            while (status := call.ucp_request_check_status(request)) == libucp.IN_PROGRESS:
                call.ucp_worker_progress(self.worker.handle)
                turn += 1
                if turn & 255 == 0:
                    self._look(request, deadline, op, began)
            call.ucp_request_free(request)
        else:
            status = request
        if status != libucp.OK:
            self.check()
            raise ConnectionLost(f"process {self.pid} has no such memory any more: {lib.text(status)}")

    def _look(self, request: int, deadline: float, op: str, began: float) -> None:
        now = time.monotonic()
        if now < deadline and self.alive():
            if now - began > _LOOK_SECONDS:
                time.sleep(0.0001)
            return
        self.worker.lib.call.ucp_request_free(request)
        self.worker.abandon(self)
        self.check()
        raise OpTimeout(op, 0, now - began)

    def close(self) -> None:
        self.worker.disconnect(self.endpoint)
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class RemoteRegion:
    """A region that was seen in its owner's table.

    `direct` says that the kernel or this process itself does the copies: no help from the owner is needed, and none of
    them outlives its call. Otherwise bytes come through `_bounce`, so that late ones never reach the user's memory.
    """

    def __init__(self, owner: Owner, address: Address) -> None:
        self.owner, self.address = owner, address
        self._worker, self._call = owner.worker, owner.worker.lib.call
        ffi = owner.worker.lib.ffi
        self._key = owner.unpack(address.key)
        self._table_key = owner.unpack(address.table_key)
        pointer = ffi.new("uintptr_t *")
        self.direct = self._call.ucp_rkey_ptr(self._table_key, address.row, pointer) == libucp.OK
        self._generation = ffi.cast("uint64_t *", int(pointer[0])) if self.direct else ffi.NULL
        self._words, self._words_at = owner.words, owner.words_at
        self._atomic = ffi.new(
            "ucp_request_param_t *",
            {
                "op_attr_mask": libucp.ATTR_DATATYPE | libucp.ATTR_REPLY_BUFFER,
                "datatype": libucp.contiguous(8),
                "reply_buffer": self._words + 1,
            },
        )

    def check(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        self.owner.check()
        if self.direct:
            seen = int(self._generation[0])
        else:
            request = self._call.ucp_get_nbx(
                self.owner.endpoint, self._words_at, 8, self.address.row, self._table_key, self._worker.plain
            )
            self.owner.wait(request, deadline, "memory access")
            seen = int(self._words[0])
        if seen != self.address.generation:
            raise RegionGone(f"process {self.owner.pid} closed the region; what was read of it must not be used")

    def pull(self, into: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block of the region to the address `into`. Raises `RegionGone` if it must not be used."""
        if nbytes:
            target = into if self.direct else self._worker.bounce(nbytes)
            request = self._call.ucp_get_nbx(
                self.owner.endpoint, target, nbytes, self.address.memory + offset, self._key, self._worker.plain
            )
            self.owner.wait(request, deadline, "memory read")
            if target != into:
                ctypes.memmove(into, target, nbytes)
        self.check(deadline)

    def push(self, source: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block at the address `source` into the region, while its owner's `close` waits."""
        if not self.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        token = writer_token(this_process())
        self._enter(token, deadline)
        try:
            self.check(deadline)
            if nbytes:
                target = source if self.direct else self._worker.bounce(nbytes)
                if target != source:
                    ctypes.memmove(target, source, nbytes)
                request = self._call.ucp_put_nbx(
                    self.owner.endpoint, target, nbytes, self.address.memory + offset, self._key, self._worker.plain
                )
                self.owner.wait(request, deadline, "memory write")
                flush = self._call.ucp_ep_flush_nbx(self.owner.endpoint, self._worker.plain)
                self.owner.wait(flush, deadline, "memory write")
            self.check(deadline)
        finally:
            self._compare_and_swap(token, 0, max(deadline, time.monotonic() + _LEAVE_SECONDS))

    def _enter(self, token: int, deadline: float) -> None:
        """Become the row's writer; take over from one that died."""
        expected = 0
        while (seen := self._compare_and_swap(expected, token, deadline)) != expected:
            self.check(deadline)
            expected = seen if self.owner.here and seen and not writer_lives(seen) else 0
            if time.monotonic() > deadline:
                raise OpTimeout("waiting for another writer of a region", 0, 0.0)
            if not expected:
                time.sleep(0.0001)

    def _compare_and_swap(self, expected: int, desired: int, deadline: float) -> int:
        """What the row's writer was; `desired` from now on if that was `expected`."""
        self._words[0], self._words[1] = expected, desired
        request = self._call.ucp_atomic_op_nbx(
            self.owner.endpoint,
            libucp.ATOMIC_CSWAP,
            self._words_at,
            1,
            self.address.row + 8,
            self._table_key,
            self._atomic,
        )
        self.owner.wait(request, deadline, "memory write")
        return int(self._words[1])

    def close(self) -> None:
        self._call.ucp_rkey_destroy(self._key)
        self._call.ucp_rkey_destroy(self._table_key)
