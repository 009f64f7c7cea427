"""Windows over a network that reads and writes memory in hardware; the target's progress thread does the rest.

Every rank registers its tensor, and a header: memory allocated by UCX, which holds what the others write to its rank.

A target may compute or sleep, but a stopped one may delay gets, atomics and flushes until they time out. Puts and
signals return when they have left; `flush` returns when they have arrived. A rank that closes its window writes so to
all ranks, and they check that word. The bytes of a get arrive after the word, so a get never returns bytes from after
the close.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
import torch

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided.regions import Mapping
from holdfast.backends.ucx.onesided.worker import OneSidedWorker, exchange
from holdfast.comms.errors import HoldfastError, OpTimeout
from holdfast.comms.system.cpu_wait import words_at
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Transport
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

BOUNCE_BYTES = 1 << 20
"""Bytes of each of the two blocks of a get that are under way at once.

They pass through memory of the window, so those of an abandoned get never reach the user's.
"""

LEAVE_SECONDS = 0.3
"""How long `close` waits until peers know of it."""
_LEAST_SECONDS = 0.02


class _PartAddress(msgspec.Struct, frozen=True, array_like=True):
    """The addresses of a rank's header and memory. `key` is empty for a window without elements."""

    header: int
    header_key: bytes
    memory: int
    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A rank's part, as this rank accesses it."""

    endpoint: Any
    header: int
    header_key: Any
    memory: int
    key: Any
    nbytes: int


class FarWindow(WindowMemory):
    """See the module. Calls may come from several threads."""

    access: ClassVar[Literal["mapped", "rdma", "messages"]] = "rdma"

    def __init__(self, side: OneSidedWorker, transport: Transport, tensor: torch.Tensor, deadline: float) -> None:
        super().__init__(side.size)
        self._side, self._exposed = side, ExposedMemory(tensor)
        self._worker, self._call, self._plain = side.worker, side.worker.lib.call, side.worker.plain
        self._rank, self._size = side.rank, side.size
        self._signalling = threading.Lock()
        self._closed = False
        self._parts: list[RemotePart] = []
        self._signalled = [0] * side.size
        self._dirty = [False] * side.size
        self._memory: Mapping | None = None
        side.sweep()
        words = 2 * side.size
        with side.lock:
            self._header = Mapping(self._worker, 8 * words, None)
        ctypes.memset(self._header.address, 0, 8 * words)
        self._mine = words_at(self._header.address, words)
        """What the others write: two words of each, whether it has closed its window, and its count of signals."""
        try:
            self._open(transport, deadline)
            self.sizes = [part.nbytes for part in self._parts]
            transport.barrier(deadline)
        except BaseException:
            self._closed = True
            self._release_memory()
            raise

    def _open(self, transport: Transport, deadline: float) -> None:
        """Expose the tensor, and find the parts of all ranks; collective."""
        exposed = self._exposed
        with self._side.lock:
            if exposed.nbytes:
                self._memory = Mapping(self._worker, exposed.nbytes, exposed.address)
        memory = self._memory
        card = _PartAddress(
            self._header.address,
            self._header.key,
            memory.address if memory else 0,
            memory.key if memory else b"",
            exposed.nbytes,
        )
        cards = exchange(transport, msgspec.msgpack.encode(card), deadline)
        for rank, text in enumerate(cards):
            self._parts.append(self._reach(rank, msgspec.msgpack.decode(text, type=_PartAddress)))

    def _reach(self, rank: int, card: _PartAddress) -> RemotePart:
        side = self._side
        with side.lock:
            header_key = side.unpack(rank, card.header_key)
            key = side.unpack(rank, card.key) if card.key else None
        return RemotePart(side.endpoints[rank], card.header, header_key, card.memory, key, card.nbytes)

    # -- liveness

    def check_live(self, rank: int) -> None:
        self._live(rank)

    def _live(self, rank: int) -> RemotePart:
        if self.leaving:
            raise closed_here()
        if self._mine[2 * rank]:
            raise closed_there(rank)
        self._side.check(rank)
        return self._parts[rank]

    # -- put and get

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        if not source.nbytes:
            return
        self._dirty[rank] = True
        with self._side.lock:
            request = self._call.ucp_put_nbx(
                part.endpoint, source.data_ptr(), source.nbytes, part.memory + offset, part.key, self._plain
            )
        self._side.wait(request, rank, deadline, "put", source)

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        if into.nbytes:
            self._fetch(rank, part, into.data_ptr(), into.nbytes, part.memory + offset, deadline)
        self._live(rank)

    def _fetch(self, rank: int, part: RemotePart, into: int, nbytes: int, at: int, deadline: float) -> None:
        """Fetch with two blocks under way, through memory of the window."""
        ffi, side = self._worker.lib.ffi, self._side
        width = min(BOUNCE_BYTES, nbytes)
        kept = ffi.new("char[]", 2 * width if nbytes > width else width)
        bounce = int(ffi.cast("uintptr_t", kept))
        self._settle(rank, deadline, "get")
        pending: list[tuple[int, int, int]] = []
        start = 0
        while start < nbytes or pending:
            while start < nbytes and len(pending) < 2:
                block = min(width, nbytes - start)
                place = bounce + start // width % 2 * width
                with side.lock:
                    request = self._call.ucp_get_nbx(part.endpoint, place, block, at + start, part.key, self._plain)
                pending.append((request, start, block))
                start += block
            request, done, block = pending.pop(0)
            try:
                side.wait(request, rank, deadline, "get", kept)
            except HoldfastError:
                with side.lock:
                    for other, _, _ in pending:
                        if other > 0:
                            self._call.ucp_request_free(other)
                    self._worker.abandon(kept)
                raise
            ctypes.memmove(into + done, bounce + done // width % 2 * width, block)

    def _settle(self, rank: int, deadline: float, op: str) -> None:
        """Wait until the puts that were issued to `rank` have taken effect there."""
        if self._dirty[rank]:
            self._side.flush(rank, deadline, op)
            self._dirty[rank] = False

    # -- atomics

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self._amo(rank, offset, dtype, libucp.ATOMIC_ADD, (value, 0), deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._amo(rank, offset, dtype, libucp.ATOMIC_CSWAP, (expected, desired), deadline)

    def _amo(
        self, rank: int, offset: int, dtype: torch.dtype, code: int, values: Sequence[int], deadline: float
    ) -> int:
        """Run an atomic of UCX itself. Its buffers are its own, since it may be carried out after it was abandoned.

        It begins when nothing waits to be sent to `rank`, so that it leaves at once: UCX ends the process if it has to
        cancel one that did not leave, as when the peer dies.
        """
        ffi, size = self._worker.lib.ffi, dtype.itemsize
        words = ffi.new("int32_t[2]" if size == 4 else "int64_t[2]", list(values))
        parameters = libucp.atomic_parameters(self._worker.lib, size, words)
        address = int(ffi.cast("uintptr_t", words))
        while True:
            part = self._live(rank)
            with self._side.lock:
                flush = self._call.ucp_ep_flush_nbx(part.endpoint, self._plain)
                if not flush:
                    request = self._call.ucp_atomic_op_nbx(
                        part.endpoint, code, address, 1, part.memory + offset, part.key, parameters
                    )
                    break
            self._side.wait(flush, rank, deadline, "atomic")
            if time.monotonic() > deadline:
                raise OpTimeout("atomic", 0, 0.0, (rank,))
        self._side.wait(request, rank, deadline, "atomic", (words, parameters))
        return int(words[1])

    # -- signals, and the end

    def signal(self, rank: int, deadline: float) -> None:
        part = self._live(rank)
        with self._signalling:
            self._signalled[rank] += 1
            self._notify(rank, part, 2 * self._rank + 1, self._signalled[rank], deadline, "signal")

    def flush(self, rank: int | None, deadline: float) -> None:
        for target in range(self._size) if rank is None else (rank,):
            self._live(target)
            self._side.flush(target, deadline, "flush")

    def _notify(self, rank: int, part: RemotePart, word: int, value: int, deadline: float, op: str) -> None:
        """Set a word in a rank's header, after all that was issued to it before."""
        kept = self._worker.lib.ffi.new("uint64_t[1]", [value])
        address = int(self._worker.lib.ffi.cast("uintptr_t", kept))
        self._settle(rank, deadline, op)
        with self._side.lock:
            request = self._call.ucp_put_nbx(
                part.endpoint, address, 8, part.header + 8 * word, part.header_key, self._plain
            )
        self._dirty[rank] = True
        self._side.wait(request, rank, deadline, op, kept)

    def count_signals(self, rank: int) -> int:
        with self._side.lock:
            while self._worker.progress():
                pass
        return int(self._mine[2 * rank + 1])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._announce_close()
        finally:
            self._release_memory()

    def _announce_close(self) -> None:
        """Tell all living ranks that this window is closed; unless stopped, they know it when this returns."""
        until = time.monotonic() + LEAVE_SECONDS
        self._mine[2 * self._rank] = 1
        try:
            dead = self._side.find_dead()
        except HoldfastError:
            dead = frozenset()
        for told in (False, True):
            for rank in range(self._size):
                if rank == self._rank or rank in dead:
                    continue
                limit = max(until, time.monotonic() + _LEAST_SECONDS)
                try:
                    if told:
                        self._side.flush(rank, limit, "closing a window")
                    else:
                        self._notify(rank, self._parts[rank], 2 * self._rank, 1, limit, "closing a window")
                except HoldfastError:
                    continue  # the peer is stopped or gone

    def _withdraw(self) -> None:
        """Stop exposing the tensor's memory. Transfers that arrive later must not find memory in use."""
        if self._all_closed():
            self._unmap()
            return
        self._side.keep(partial(self._release, self._exposed.vacate()))

    def _release(self, memory: torch.Tensor, silent: bool) -> bool:
        """Free `memory`, which must live until then, once nothing can arrive any more."""
        if silent or self._all_closed():
            self._unmap()
            return True
        return False

    def _all_closed(self) -> bool:
        """Whether nothing can arrive from the others any more: each sends its close after all else."""
        return all(self._mine[2 * rank] for rank in range(self._size))

    def _release_memory(self) -> None:
        with self._side.lock:
            for part in self._parts:
                for key in (part.header_key, part.key):
                    if key is not None:
                        self._call.ucp_rkey_destroy(key)
        self._parts.clear()
        self._withdraw()

    def _unmap(self) -> None:
        """Release the registered memory."""
        with self._side.lock:
            for mapping in (self._memory, self._header):
                if mapping is not None:
                    mapping.close()
