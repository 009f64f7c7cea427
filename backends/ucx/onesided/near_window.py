"""Windows over shared memory (`posix,cma,self`): the kernel copies between the tensors, and all ranks map the headers.

A target that computes, sleeps or was stopped delays no other rank. A writer sets its word in the target's header, then
checks that the window is open; the owner closes the window, then checks the words. A full fence stands between the two
steps on both sides, so at least one of them sees the other: `close` knows whether a writer is in the middle of a block,
and leaves the memory to a writer that was stopped there.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, ClassVar, Literal

import torch

from holdfast.backends.common.process_memory import put_on_huge_pages
from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided._near import BLOCK, CLOSED, Near, NearPart
from holdfast.backends.ucx.onesided.deferred_free import free_later
from holdfast.backends.ucx.onesided.mapped_window import RegisteredWindow, RemotePart
from holdfast.backends.ucx.onesided.regions import writer_lives, writer_token
from holdfast.backends.ucx.onesided.window import LEAVE_SECONDS, SLEEP_SECONDS, YIELDS
from holdfast.backends.ucx.onesided.worker import OneSidedWorker
from holdfast.backends.ucx.worker import UcxWorker
from holdfast.comms._native import Words, fence
from holdfast.comms.errors import OpTimeout
from holdfast.comms.system.cpu_wait import words_at, yield_cpu
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Peer, Transport
from holdfast.comms.transport.liveness import this_process
from holdfast.comms.transport.window_memory import closed_there

_MOVING_SECONDS = 1.0
"""The most seconds for moving a window to huge pages, which halves the time of a large get or put."""


class NearWindow(RegisteredWindow):
    """See the module."""

    access: ClassVar[Literal["mapped", "rdma", "messages"]] = "rdma"

    def __init__(self, side: OneSidedWorker, transport: Transport, tensor: torch.Tensor, deadline: float) -> None:
        self._lock_word, self._busy = 2 * side.size, 2 * side.size + 1 + side.rank
        self._token = writer_token(this_process())
        ffi = side.worker.lib.ffi
        self._reply = ffi.new("uint64_t[2]")
        self._reply_at = int(ffi.cast("uintptr_t", self._reply))
        self._atomic = libucp.atomic_parameters(side.worker.lib, 8, self._reply)
        if tensor.nbytes >= BLOCK:
            put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, _MOVING_SECONDS)
        self._near: list[NearPart] = []
        self._words: list[Words] = []
        """The headers of all ranks."""
        super().__init__(side, transport, tensor, deadline)

    def _mapped(self, key: Any, header: int) -> int:
        ffi = self._worker.lib.ffi
        pointer = ffi.new("uintptr_t *")
        self._worker.lib.check(self._call.ucp_rkey_ptr(key, header, pointer), "mapping the header of a window")
        return int(pointer[0])

    def _open(self, transport: Transport, deadline: float) -> None:
        super()._open(transport, deadline)
        near = _near_calls(self._worker)
        for rank, part in enumerate(self._parts):
            self._words.append(words_at(part.mapped, self._header_words))
            self._near.append(
                NearPart(
                    near,
                    endpoint=self._at(part.endpoint),
                    memory=part.memory,
                    key=self._at(part.key),
                    closed=self._header.address + 16 * rank,
                    busy=part.mapped + 8 * self._busy,
                )
            )

    def _at(self, pointer: Any) -> int:
        return 0 if pointer is None else int(self._worker.lib.ffi.cast("uintptr_t", pointer))

    # -- put and get

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        self._side.check(rank)
        near = self._near[rank]
        address, nbytes = span(source)
        if not nbytes:
            self._live(rank)
        start = 0
        while start < nbytes:
            with self._side.lock:
                request = near.put(address + start, nbytes - start, offset + start)
                if request:
                    try:
                        self._finish_put(request, rank, deadline)
                    finally:
                        self._words[rank][self._busy] = 0
            start += BLOCK
            if start < nbytes and time.monotonic() > deadline:
                raise OpTimeout("put", 0, 0.0, (rank,))

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        self._live(rank)
        near = self._near[rank]
        address, nbytes = span(into)
        start = 0
        while start < nbytes:
            with self._side.lock:
                request = near.get(address + start, nbytes - start, offset + start)
                if request:
                    self._side.wait(request, rank, deadline, "get")
            start += BLOCK
            if start < nbytes and time.monotonic() > deadline:
                raise OpTimeout("get", 0, 0.0, (rank,))
        self._live(rank)

    def _finish_put(self, request: int, rank: int, deadline: float) -> None:
        """Complete a put that was not done at once. The lock is held."""
        if request == CLOSED:
            raise closed_there(rank)
        self._side.wait(request, rank, deadline, "put")

    def _enter(self, rank: int) -> None:
        """Check that the window is open, after setting this rank's word and before writing. See the module."""
        fence()
        if self._mine[2 * rank]:
            raise closed_there(rank)

    # -- atomics

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self._update(rank, self._live(rank), offset, dtype, None, value, deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._update(rank, self._live(rank), offset, dtype, expected, desired, deadline)

    def _update(
        self,
        rank: int,
        part: RemotePart,
        offset: int,
        dtype: torch.dtype,
        expected: int | None,
        value: int,
        deadline: float,
    ) -> int:
        """Change an element under the target's lock word: add `value`, or set it to `value` if it is `expected`.

        UCX's own atomics reach only memory that it allocated.
        """
        kind = ctypes.c_int32 if dtype == torch.int32 else ctypes.c_int64
        element = kind()
        here, size = ctypes.addressof(element), dtype.itemsize
        with self._side.lock:
            words = self._words[rank]
            words[self._busy] = 1
            try:
                self._take_lock(rank, part, deadline)
                try:
                    self._enter(rank)
                    self._side.wait(self._near[rank].get(here, size, offset), rank, deadline, "atomic")
                    old = element.value
                    if expected is None or old == expected:
                        element.value = old + value if expected is None else value
                        if request := self._near[rank].put_entered(here, size, offset):
                            self._finish_put(request, rank, deadline)
                finally:
                    words[self._lock_word] = 0
            finally:
                words[self._busy] = 0
        self._live(rank)
        return old

    def _take_lock(self, rank: int, part: RemotePart, deadline: float) -> None:
        """Take a rank's lock word, or take it over from a holder that died."""
        began, expected, turns = time.monotonic(), 0, 0
        while (seen := self._swap_lock(rank, part, expected, deadline)) != expected:
            expected = seen if seen and not writer_lives(seen) else 0
            turns += 1
            if time.monotonic() > deadline:
                raise OpTimeout("atomic", 0, time.monotonic() - began, (self._rank_of(seen, rank),))
            self._live(rank)
            if not expected:
                yield_cpu() if turns < YIELDS else time.sleep(SLEEP_SECONDS)

    def _rank_of(self, token: int, otherwise: int) -> int:
        """The rank of the process with this token; `otherwise` if there is none."""
        peers = self._side.peers
        return next((rank for rank, peer in enumerate(peers) if writer_token(peer) == token), otherwise)

    def _swap_lock(self, rank: int, part: RemotePart, expected: int, deadline: float) -> int:
        reply = self._reply
        reply[0], reply[1] = expected, self._token
        at = part.header + 8 * self._lock_word
        request = self._call.ucp_atomic_op_nbx(
            part.endpoint, libucp.ATOMIC_CSWAP, self._reply_at, 1, at, part.header_key, self._atomic
        )
        self._side.wait(request, rank, deadline, "atomic")
        return int(reply[1])

    # -- signals, and the end

    def flush(self, rank: int | None, deadline: float) -> None:
        """Copies are complete when they return."""
        if rank is not None:
            self._live(rank)
            return
        for target in range(self._size):
            self._live(target)

    def _notify(self, rank: int, part: RemotePart, word: int, value: int, deadline: float, op: str) -> None:
        self._words[rank][word] = value

    def _writers(self) -> list[Peer]:
        """The processes that may be in the middle of writing a block of this rank's memory."""
        fence()
        busy = [rank for rank in range(self._size) if self._mine[self._lock_word + 1 + rank]]
        peers = [self._side.peers[rank] for rank in busy if rank != self._rank]
        return [peer for peer in peers if writer_lives(writer_token(peer))]

    def _withdraw(self) -> None:
        until = time.monotonic() + LEAVE_SECONDS
        while (writers := self._writers()) and time.monotonic() < until:
            time.sleep(SLEEP_SECONDS)
        if writers:
            free_later(self._exposed, writers)
        self._unmap()


def _near_calls(worker: UcxWorker) -> Near:
    ffi, call = worker.lib.ffi, worker.lib.call

    def at(name: str) -> int:
        return int(ffi.cast("uintptr_t", ffi.addressof(call, name)))

    return Near(
        get=at("ucp_get_nbx"),
        put=at("ucp_put_nbx"),
        progress=at("ucp_worker_progress"),
        status=at("ucp_request_check_status"),
        free=at("ucp_request_free"),
        worker=int(ffi.cast("uintptr_t", worker.handle)),
        param=int(ffi.cast("uintptr_t", worker.plain)),
    )
