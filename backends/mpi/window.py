"""Windows over MPI: requests to the thread of the rank that owns the memory (`window_server`), and its replies.

A target that computes or sleeps delays its callers little: its thread polls for requests, every millisecond when there
have been none. It needs the GIL for that, and a stopped process runs no threads: gets from it time out. Every call is
complete at the target, too, when it returns.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

from holdfast.backends.mpi.buffers import buffer_of
from holdfast.backends.mpi.window_server import (
    ADD,
    CLOSED,
    FLUSH,
    GET,
    GONE,
    INLINE_BYTES,
    PUT,
    REFUSED,
    REPLY,
    REQUEST_TAG,
    SIGNAL,
    SWAP,
    ExposedPart,
    WindowRequest,
    WindowServer,
    data_tag,
    reply_tag,
)
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.onesided.peer_watch import PeerWatch
from holdfast.comms.system.cpu_wait import yield_cpu
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Transport
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

CHUNK_BYTES = 1 << 20
"""Bytes of each of the two chunks of a get that are under way at once.

They pass through memory of the window, so those of an abandoned get never reach the user's.
"""
PUT_BYTES = 64 << 20
"""Bytes of a put between two checks of the window."""
_LOOK_SECONDS = 0.001
_SPINS = 64
_YIELDS = 2000
_SLEEP_SECONDS = 0.0001


class WindowService:
    """The state that all windows of a communicator share.

    `comm` has the same ranks, and nothing else uses it. `abandon` keeps a request that was given up, and the memory
    that MPI may still access.
    """

    def __init__(self, comm: MPI.Intracomm, watch: PeerWatch, abandon: Callable[[MPI.Request, object], None]) -> None:
        self.comm, self.abandon, self.check = comm, abandon, watch.check
        self.numbers, self.windows = itertools.count(secrets.randbits(62)), itertools.count(1)
        self.server = WindowServer(comm)

    def send(self, request: WindowRequest, rank: int, data: bytes = b"") -> None:
        """Begin to send a request to the server of a rank."""
        frame = request.encode() + data
        sent = self.comm.Isend([frame, MPI.BYTE], rank, REQUEST_TAG)
        if not sent.Test():
            self.abandon(sent, frame)

    def close(self) -> None:
        for request, kept in self.server.close():
            self.abandon(request, kept)


class _Reply:
    """A reply that this rank awaits."""

    def __init__(self, service: WindowService, rank: int, number: int, room: int = 0) -> None:
        self._service, self._rank, self._number = service, rank, number
        self._text = bytearray(REPLY.size + room)
        self.expect_another()

    def expect_another(self) -> None:
        """Expect one more reply to the same request."""
        self._request = self._service.comm.Irecv([self._text, MPI.BYTE], self._rank, reply_tag(self._number))

    def poll(self) -> tuple[int, int, memoryview] | None:
        """The outcome, value and data of the reply, or None if it has not come."""
        if not self._request.Test():
            return None
        outcome, number, value = REPLY.unpack_from(self._text)
        if number != self._number:  # the reply to an abandoned request
            self.expect_another()
            return None
        return outcome, value, memoryview(self._text)[REPLY.size :]

    def cancel(self) -> None:
        withdraw(self._service, self._request, self._text)


def withdraw(service: WindowService, request: MPI.Request, kept: object) -> None:
    """Stop waiting for a message."""
    try:
        if request != MPI.REQUEST_NULL:
            request.Cancel()
            if not request.Test():
                service.abandon(request, kept)
    except MPI.Exception:
        pass


class MpiWindow(WindowMemory):
    """See the module. Calls may come from several threads."""

    def __init__(self, service: WindowService, transport: Transport, tensor: torch.Tensor, deadline: float) -> None:
        super().__init__(transport.size)
        self._service, self._rank = service, transport.rank
        self._number = next(service.windows)
        self._mine = ExposedPart(tensor, transport.size)
        service.server.add(self._number, self._mine)
        try:
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(transport.size)]
            transport.all_gather(sizes, torch.tensor([tensor.nbytes], device="cpu"), deadline)
        except BaseException:
            service.server.drop(self._number)
            raise
        self.sizes = [int(size) for size in sizes]

    def check_live(self, rank: int) -> None:
        if self.leaving:
            raise closed_here()
        if self._mine.closed[rank]:
            raise closed_there(rank)
        self._service.check(rank)

    # -- one request

    def _send_request(
        self,
        kind: int,
        rank: int,
        deadline: float,
        offset: int = 0,
        nbytes: int = 0,
        itemsize: int = 0,
        operands: tuple[int, int] = (0, 0),
        data: bytes = b"",
        room: int = 0,
    ) -> tuple[_Reply, int]:
        """Send a request; returns its future reply and its number."""
        number = next(self._service.numbers)
        reply = _Reply(self._service, rank, number, room)
        request = WindowRequest(kind, self._number, number, offset, nbytes, itemsize, *operands)
        try:
            self._service.send(request, rank, data)
        except MPI.Exception as error:
            raise self._explain(rank, error) from error
        return reply, number

    def _await_reply(self, reply: _Reply, rank: int, deadline: float, op: str) -> tuple[int, memoryview]:
        """Wait for a reply; returns its value and data. Raises `RegionGone`, `OpTimeout`."""
        began, turns = time.monotonic(), 0
        try:
            while (heard := reply.poll()) is None:
                turns += 1
                if turns % _SPINS:
                    continue
                try:
                    self.check_live(rank)
                except HoldfastError:
                    if (heard := reply.poll()) is not None:  # it came between the two looks, before the rank closed
                        break
                    raise
                if time.monotonic() > deadline:
                    raise OpTimeout(op, 0, time.monotonic() - began, (rank,))
                if turns < _SPINS * _YIELDS:
                    yield_cpu()
                else:
                    time.sleep(_SLEEP_SECONDS)
        except MPI.Exception as error:
            raise self._explain(rank, error) from error
        outcome, value, data = heard
        if outcome == GONE:
            raise closed_there(rank)
        if outcome == REFUSED:
            raise HoldfastError(f"{op}: rank {rank} refused the request; its log says why")
        return value, data

    def _explain(self, rank: int, error: MPI.Exception) -> Exception:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            self.check_live(rank)
            time.sleep(_LOOK_SECONDS)
        return RegionGone(f"the window of rank {rank} cannot be reached: {error.Get_error_string()}")

    def _call(self, op: str, kind: int, rank: int, deadline: float, *arguments: object, **named: object) -> int:
        reply, _ = self._send_request(kind, rank, deadline, *arguments, **named)  # type: ignore[arg-type]
        try:
            return self._await_reply(reply, rank, deadline, op)[0]
        finally:
            reply.cancel()

    # -- the ops

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            ctypes.memmove(self._mine.address + offset, source.data_ptr(), source.nbytes)
        elif 0 < source.nbytes <= INLINE_BYTES:
            data = ctypes.string_at(source.data_ptr(), source.nbytes)
            self._call("put", PUT, rank, deadline, offset, source.nbytes, data=data)
        else:
            flat = source.view(-1).view(torch.uint8)
            for start in range(0, source.nbytes, PUT_BYTES):
                self._put(rank, offset + start, flat[start : start + PUT_BYTES], deadline)

    def _put(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        if source.nbytes <= INLINE_BYTES:
            self.write(rank, offset, source, deadline)
            return
        reply, number = self._send_request(PUT, rank, deadline, offset, source.nbytes)
        try:
            self._await_reply(reply, rank, deadline, "put")
            reply.expect_another()
            sent = self._service.comm.Isend([buffer_of(source), MPI.BYTE], rank, data_tag(number))
            try:
                self._await_reply(reply, rank, deadline, "put")
                while not sent.Test():  # the bytes have arrived; MPI will notice soon
                    self._service.check(rank)
                    yield_cpu()
            finally:
                if sent != MPI.REQUEST_NULL:
                    self._service.abandon(sent, source)
        except MPI.Exception as error:
            raise self._explain(rank, error) from error
        finally:
            reply.cancel()

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        address, nbytes = into.data_ptr(), into.nbytes
        if rank == self._rank:
            ctypes.memmove(address, self._mine.address + offset, nbytes)
        elif 0 < nbytes <= INLINE_BYTES:
            reply, _ = self._send_request(GET, rank, deadline, offset, nbytes, room=nbytes)
            try:
                _, data = self._await_reply(reply, rank, deadline, "get")
                ctypes.memmove(address, (ctypes.c_char * nbytes).from_buffer(data), nbytes)
            finally:
                reply.cancel()
        else:
            self._fetch(rank, offset, address, nbytes, deadline)
        self.check_live(rank)

    def _fetch(self, rank: int, offset: int, address: int, nbytes: int, deadline: float) -> None:
        """Fetch a large get: two chunks under way, through memory of the window."""
        pending: list[tuple[_Reply, MPI.Request, torch.Tensor, int]] = []
        start = 0
        try:
            while start < nbytes or pending:
                while start < nbytes and len(pending) < 2:
                    block = min(CHUNK_BYTES, nbytes - start)
                    if block <= INLINE_BYTES:
                        small = torch.empty(block, dtype=torch.uint8, device="cpu")
                        self.read(rank, offset + start, small, deadline)
                        ctypes.memmove(address + start, small.data_ptr(), block)
                    else:
                        pending.append((*self._begin(rank, offset + start, block, deadline), start))
                    start += block
                if not pending:
                    break
                reply, coming, bounce, at_byte = pending[0]
                self._await_reply(reply, rank, deadline, "get")
                while not coming.Test():
                    self._service.check(rank)
                    yield_cpu()
                ctypes.memmove(address + at_byte, bounce.data_ptr(), bounce.nbytes)
                reply.cancel()
                pending.pop(0)
        except MPI.Exception as error:
            raise self._explain(rank, error) from error
        finally:
            for reply, coming, bounce, _ in pending:
                reply.cancel()
                withdraw(self._service, coming, bounce)

    def _begin(self, rank: int, offset: int, nbytes: int, deadline: float) -> tuple[_Reply, MPI.Request, torch.Tensor]:
        bounce = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        number = next(self._service.numbers)
        reply = _Reply(self._service, rank, number)
        coming = self._service.comm.Irecv([buffer_of(bounce), MPI.BYTE], rank, data_tag(number))
        self._service.send(WindowRequest(GET, self._number, number, offset, nbytes), rank)
        return reply, coming, bounce

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self._change(ADD, rank, offset, dtype, (value, 0), deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._change(SWAP, rank, offset, dtype, (expected, desired), deadline)

    def _change(
        self, kind: int, rank: int, offset: int, dtype: torch.dtype, operands: tuple[int, int], deadline: float
    ) -> int:
        self.check_live(rank)
        if rank == self._rank:
            with self._mine.lock:
                return self._mine.change(kind, offset, dtype.itemsize, *operands)
        return self._call("atomic", kind, rank, deadline, offset, 0, dtype.itemsize, operands)

    def signal(self, rank: int, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            with self._mine.lock:
                self._mine.signalled[rank] += 1
        else:
            self._call("signal", SIGNAL, rank, deadline)

    def count_signals(self, rank: int) -> int:
        return self._mine.signalled[rank]

    def flush(self, rank: int | None, deadline: float) -> None:
        for target in range(len(self.sizes)) if rank is None else (rank,):
            self.check_live(target)
            if target != self._rank:
                self._call("flush", FLUSH, target, deadline)

    def close(self) -> None:
        mine = self._mine
        with mine.lock:
            if not mine.open:
                return
            mine.open = False
            if mine.busy:
                mine.memory.vacate()
            mine.memory = ExposedMemory(torch.empty(0, device="cpu"))
        self._service.server.drop(self._number)
        notice = WindowRequest(CLOSED, self._number, 0)
        for rank in range(len(self.sizes)):
            if rank == self._rank:
                continue
            try:
                self._service.send(notice, rank)
            except MPI.Exception:
                continue  # the peer is gone
