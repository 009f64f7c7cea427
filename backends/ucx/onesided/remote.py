"""A region of another process: its memory, read and written through UCX, and its row in the owner's table.

Each call is made with the plane's lock held, and moves one block at most.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided.regions import ROW_BYTES, UcxAddress, writer_lives, writer_token
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms._native import fence
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.comms.system.cpu_wait import Wait, words_at
from holdfast.comms.transport.liveness import Liveness, this_host, this_process

PIECE_BYTES = 1 << 20
"""Bytes of one transfer over a network."""
_TURNS = 16
"""Progress calls between two looks at the owner."""
_WAIT = Wait(yields=200, sleep_seconds=0.0001)
_LEAVE_SECONDS = 0.5


_NO_RANK = -1
"""Of this process among the owner's one process: the owner may be this process itself."""


class OwnerUnreachable(RegionGone):
    """The connection broke, though the owner lives as far as is known: a new connection may still find the region."""


class Owner:
    """A connection to a process that exposes memory. `here` says whether it is on this host."""

    _keys = itertools.count(1)

    def __init__(self, worker: UcxWorker, address: UcxAddress) -> None:
        self.worker, self.key, self.broken = worker, next(self._keys), ""
        self.pid, self.here = address.owner.pid, address.owner.host == this_host()
        self.token = writer_token(this_process())
        self._answered = True
        self._liveness = Liveness([address.owner], rank=_NO_RANK)
        self.check()
        self.words = worker.lib.ffi.new("uint64_t[3]")
        self.words_at = int(worker.lib.ffi.cast("uintptr_t", self.words))
        try:
            self.endpoint: Any = worker.connect(address.worker, self.key)
        except libucp.UcxError as error:
            self._liveness.close()
            raise RegionGone(f"process {self.pid} cannot be reached: {error}") from error

    def alive(self) -> bool:
        """False once its process is known to be gone."""
        return not self._liveness.dead()

    def check(self) -> None:
        if not self.alive():
            raise RegionGone(f"process {self.pid}, which exposed this region, is gone")
        if self.broken:
            raise OwnerUnreachable(f"the connection to process {self.pid} broke: {self.broken}")

    def unpack(self, key: bytes) -> Any:
        """The key to a registered memory of this owner."""
        lib, ffi = self.worker.lib, self.worker.lib.ffi
        made = ffi.new("ucp_rkey_h *")
        lib.check(lib.call.ucp_ep_rkey_unpack(self.endpoint, ffi.from_buffer(key), made), "unpacking a key")
        return made[0]

    def atomic(self, begin: Callable[[], int], deadline: float) -> None:
        """Run an atomic, once nothing waits to be sent to this owner, so that it leaves at once. Raises as `wait` does.

        UCX ends the process if it has to cancel an atomic that did not leave, as when the owner dies.
        """
        op = "taking a region to write to"
        worker, flush = self.worker, self.worker.lib.call.ucp_ep_flush_nbx
        while not worker.over.local and (request := flush(self.endpoint, worker.plain)):
            self.wait(request, deadline, op)
        self._answered = False
        self.wait(begin(), deadline, op)
        self._answered = True

    def wait(self, request: int, deadline: float, op: str) -> None:
        """Progress until `request` is done. Raises `RegionGone` if it failed, `OpTimeout`.

        After an `OpTimeout` the request may still be carried out.
        """
        if not request:
            return
        lib, call = self.worker.lib, self.worker.lib.call
        if request > 0:
            call.ucp_worker_progress(self.worker.handle)
            if call.ucp_request_check_status(request) == libucp.OK:
                call.ucp_request_free(request)
                return
            try:
                self.until(lambda: call.ucp_request_check_status(request) != libucp.IN_PROGRESS, deadline, op)
            except HoldfastError:
                self.worker.give_up(request, self)
                raise
            status = call.ucp_request_check_status(request)
            call.ucp_request_free(request)
        else:
            status = request
        if status != libucp.OK:
            self.check()
            raise OwnerUnreachable(f"process {self.pid} has no such memory any more: {lib.text(status)}")

    def until(self, done: Callable[[], bool], deadline: float, op: str) -> None:
        """Progress until `done()`. Raises `RegionGone` if the owner is gone, `OpTimeout`."""
        progress, handle = self.worker.lib.call.ucp_worker_progress, self.worker.handle

        def progressed() -> bool:
            for _ in range(_TURNS):
                if done():
                    return True
                progress(handle)
            return False

        _WAIT.until(progressed, self.check, deadline, lambda seconds: OpTimeout(op, 0, seconds))

    def close(self) -> None:
        if self._answered:
            self.worker.disconnect(self.endpoint)
        self._liveness.close()


class RemoteRegion:
    """A region found in its owner's table.

    `direct`: the kernel or this process itself copies, so the owner need not help, and no copy outlives its call.
    Otherwise bytes pass through `_bounce`, so that late ones never reach the user's memory.
    """

    def __init__(self, owner: Owner, address: UcxAddress) -> None:
        self.owner, self.address = owner, address
        self._worker, self._call = owner.worker, owner.worker.lib.call
        ffi = owner.worker.lib.ffi
        self._key = owner.unpack(address.key)
        self._table_key = owner.unpack(address.table_key)
        pointer = ffi.new("uintptr_t *")
        self.direct = self._call.ucp_rkey_ptr(self._table_key, address.row, pointer) == libucp.OK
        self._row = words_at(int(pointer[0]), ROW_BYTES // 8) if self.direct else None
        """The generation and the writer, if the row is mapped here."""
        self._words, self._words_at = owner.words, owner.words_at
        self._atomic = libucp.atomic_parameters(owner.worker.lib, 8, self._words)

    def check(self, deadline: float) -> None:
        """Raise `RegionGone` unless the region is open now."""
        if not self.direct:
            self.owner.wait(self._request(), deadline, "memory access")
        self._verify()

    def _request(self) -> int:
        """Begin to get the generation from afar; returns a request."""
        request: int = self._call.ucp_get_nbx(
            self.owner.endpoint, self._words_at + 16, 8, self.address.row, self._table_key, self._worker.plain
        )
        return request

    def _verify(self) -> None:
        """Raise `RegionGone` unless the generation, mapped or fetched, is the region's."""
        self.owner.check()
        if (int(self._words[2]) if self._row is None else self._row[0]) != self.address.generation:
            raise RegionGone(f"process {self.owner.pid} closed the region; what was read of it must not be used")

    # -- reading

    def pull(self, into: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block of the region to the address `into`. Raises `RegionGone` if it must not be used."""
        if self.direct and nbytes:
            self.owner.wait(self._get(into, offset, nbytes), deadline, "memory read")
        elif nbytes:
            self._pull_far(into, offset, nbytes, deadline)
            return
        self.check(deadline)

    def _get(self, into: int, offset: int, nbytes: int) -> int:
        request: int = self._call.ucp_get_nbx(
            self.owner.endpoint, into, nbytes, self.address.memory + offset, self._key, self._worker.plain
        )
        return request

    def _pull_far(self, into: int, offset: int, nbytes: int, deadline: float) -> None:
        """Read with two pieces under way at a time; the generation follows the last."""
        width = min(PIECE_BYTES, nbytes)
        bounce = self._worker.bounce(2 * width)
        pending: deque[tuple[int, int]] = deque()
        for number, start in enumerate(range(0, nbytes, width)):
            pending.append((self._get(bounce + number % 2 * width, offset + start, min(width, nbytes - start)), start))
            last = start + width >= nbytes
            while len(pending) == 2 or (last and pending):
                request, done = pending.popleft()
                self.owner.wait(request, deadline, "memory read")
                ctypes.memmove(into + done, bounce + done // width % 2 * width, min(width, nbytes - done))
        self.check(deadline)

    # -- writing

    def push(self, source: int, offset: int, nbytes: int, deadline: float) -> None:
        """Copy one block at the address `source` into the region, while `close` of its owner waits."""
        if not self.address.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        token = self.owner.token
        self._enter(token, deadline)
        try:
            if self.direct:
                fence()
                self._verify()
                if nbytes:
                    self.owner.wait(self._put(source, offset, nbytes), deadline, "memory write")
            else:
                self._push_far(source, offset, nbytes, deadline)
        except BaseException:
            self._leave(token, max(deadline, time.monotonic() + _LEAVE_SECONDS))
            raise
        self._leave(token, deadline)
        self._verify()

    def _put(self, source: int, offset: int, nbytes: int) -> int:
        request: int = self._call.ucp_put_nbx(
            self.owner.endpoint, source, nbytes, self.address.memory + offset, self._key, self._worker.plain
        )
        return request

    def _push_far(self, source: int, offset: int, nbytes: int, deadline: float) -> None:
        """Write with two pieces under way at a time; all have arrived when this returns."""
        self._verify()
        width = min(PIECE_BYTES, nbytes)
        bounce = self._worker.bounce(2 * width)
        pending: deque[int] = deque()
        for number, start in enumerate(range(0, nbytes, width or 1)):
            if len(pending) == 2:
                self.owner.wait(pending.popleft(), deadline, "memory write")
            piece, place = min(width, nbytes - start), bounce + number % 2 * width
            ctypes.memmove(place, source + start, piece)
            pending.append(self._put(place, offset + start, piece))
        while pending:
            self.owner.wait(pending.popleft(), deadline, "memory write")
        if nbytes:
            flush = self._call.ucp_ep_flush_nbx(self.owner.endpoint, self._worker.plain)
            self.owner.wait(flush, deadline, "memory write")

    def _leave(self, token: int, deadline: float) -> None:
        """Stop being the row's writer; from afar, get the generation after that."""
        if self._row is not None:
            self._row[1] = 0
        else:
            self._compare_and_swap(token, 0, deadline)

    def _enter(self, token: int, deadline: float) -> None:
        """Become the row's writer, or take over from a writer that died."""
        expected = 0
        while (seen := self._compare_and_swap(expected, token, deadline)) != expected:
            self._verify()
            expected = seen if self.owner.here and seen and not writer_lives(seen) else 0
            if time.monotonic() > deadline:
                raise OpTimeout("waiting for another writer of a region", 0, 0.0)
            if not expected:
                time.sleep(0.0001)

    def _compare_and_swap(self, expected: int, desired: int, deadline: float) -> int:
        """Compare and swap the row's writer; returns the old value. From afar, fetches the generation, too."""
        self._words[0], self._words[1] = expected, desired
        self.owner.atomic(self._swap, deadline)
        if not self.direct:
            self.owner.wait(self._request(), deadline, "memory access")
        return int(self._words[1])

    def _swap(self) -> int:
        """Begin a compare-and-swap of the row's writer; returns a request."""
        request: int = self._call.ucp_atomic_op_nbx(
            self.owner.endpoint,
            libucp.ATOMIC_CSWAP,
            self._words_at,
            1,
            self.address.row + 8,
            self._table_key,
            self._atomic,
        )
        return request

    def close(self) -> None:
        self._call.ucp_rkey_destroy(self._key)
        self._call.ucp_rkey_destroy(self._table_key)
