"""The thread that serves a rank's windows over MPI: it answers the others' requests on this rank's memory.

Open MPI has one-sided calls, but documents each of its components for them as unfit for use with faults: over shared
memory they return bytes of dead processes, and elsewhere they wait for an idle target, past any abort. Messages can be
abandoned and revoked, and report failures, so windows use messages.

A request is a frame on one tag of MPI_COMM_WORLD. Its reply comes on a tag of its own number; so do the bytes of large
puts and gets, straight out of and into the exposed memory. MPI_COMM_WORLD is used for two reasons: a communicator that
is freed must have no message under way (Open MPI gives it to the next one, and then loses messages of that one), and
messages of MPI_COMM_WORLD arrive when the communicator is revoked.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI

from holdfast.backends.common.cpu_wait import change, yield_cpu
from holdfast.comms.tensors.exposed import ExposedMemory

PUT, GET, ADD, SWAP, SIGNAL, FLUSH, CLOSED = range(7)
DONE, GO, GONE = range(3)
REQUEST = struct.Struct("=QBIQqqqqq")
"""The communicator's mark, kind, window, number, offset, nbytes, itemsize, and two operands.

The bytes of a small put follow.
"""
REPLY = struct.Struct("=BQq")
"""Outcome, number and a value; the bytes of a small get follow."""
INLINE_BYTES = 1024
"""Messages up to about this size leave whether or not the receiver polls."""

REQUEST_TAG = 1 << 30
_NUMBERS = 1 << 28
_AWAKE_SECONDS = 0.0005
_SLEEP_SECONDS = 0.00005
_PATIENT_SECONDS = 0.05
_LONG_SLEEP_SECONDS = 0.001


def reply_tag(number: int) -> int:
    return REQUEST_TAG + 1 + number % _NUMBERS


def data_tag(number: int) -> int:
    return reply_tag(number) + _NUMBERS


class ExposedPart:
    """This rank's part of a window, and what the others wrote about theirs. `lock` is held around changes."""

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self.lock = threading.Lock()
        self.memory = ExposedMemory(tensor)
        self.address = self.memory.address
        self.open = True
        self.busy = 0
        """The number of transfers straight out of or into the memory under way."""
        self.closed = [False] * size
        self.signalled = [0] * size

    def change(self, kind: int, offset: int, itemsize: int, first: int, second: int) -> int:
        """ADD `first`, or SWAP `first` for `second`; returns the old value. The lock is held."""
        return change(self.address + offset, itemsize, kind == ADD, first, second)


class _Transfer:
    """A transfer under way, the memory that it needs, and what to do when it has ended."""

    __slots__ = ("after", "kept", "request")

    def __init__(self, request: MPI.Request, kept: object, after: Callable[[bool], None]) -> None:
        self.request, self.kept, self.after = request, kept, after


class Server:
    """The thread of this process, which runs while a communicator has windows."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self._windows: dict[tuple[int, int], tuple[ExposedPart, dict[int, int]]] = {}
        self._transfers: list[_Transfer] = []
        self._users, self._using = 0, threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread, unless it runs; it ends after as many calls of `close`."""
        with self._using:
            self._users += 1
            if self._thread is None:
                self._stop.clear()
                self._thread = threading.Thread(target=self._run, name="holdfast-mpi-windows", daemon=True)
                self._thread.start()

    def add(self, mark: int, number: int, exposed: ExposedPart, ranks: dict[int, int]) -> None:
        """Serve a window; `ranks` are those of its processes."""
        self._windows[mark, number] = exposed, ranks

    def drop(self, mark: int, number: int) -> None:
        self._windows.pop((mark, number), None)

    def close(self) -> Sequence[tuple[MPI.Request, object]]:
        """Stop the thread after the last `close`; returns the transfers that it left, with their memory."""
        with self._using:
            self._users -= 1
            if self._users or self._thread is None:
                return []
            self._stop.set()
            self._thread.join()
            self._thread = None
            left = [(job.request, job.kept) for job in self._transfers]
            self._transfers.clear()
            return left

    # -- the thread

    def _run(self) -> None:
        active = time.monotonic()
        while not self._stop.is_set():
            try:
                worked = self._take_one() | self._finish_transfers()
            except MPI.Exception:
                self._comm.Ack_failed(self._comm.size)  # else a receive from any source raises for the dead
                worked = False
            now = time.monotonic()
            if worked:
                active = now
            elif now - active < _AWAKE_SECONDS or self._transfers:
                yield_cpu()
            else:
                time.sleep(_SLEEP_SECONDS if now - active < _PATIENT_SECONDS else _LONG_SLEEP_SECONDS)

    def _take_one(self) -> bool:
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, REQUEST_TAG, status)
        if message is None:
            return False
        frame = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([frame, MPI.BYTE])
        self._answer(status.Get_source(), frame)
        return True

    def _finish_transfers(self) -> bool:
        worked = False
        for job in self._transfers[:]:
            try:
                ended, well = job.request.Test(), True
            except MPI.Exception:
                ended, well = True, False
            if ended:
                self._transfers.remove(job)
                job.after(well)
                worked = True
        return worked

    def _answer(self, source: int, frame: bytearray) -> None:
        mark, kind, window, number, offset, nbytes, itemsize, first, second = REQUEST.unpack_from(frame)
        found = self._windows.get((mark, window))
        if found is None:
            if kind != CLOSED:
                self._reply(source, number, GONE)
            return
        exposed, ranks = found
        rank = ranks[source]
        with exposed.lock:
            if kind == CLOSED:
                exposed.closed[rank] = True
                return
            if not exposed.open or exposed.memory.moved:
                self._reply(source, number, GONE)
                return
            if kind == SIGNAL:
                exposed.signalled[rank] += 1
            elif kind in (ADD, SWAP):
                self._reply(source, number, DONE, exposed.change(kind, offset, itemsize, first, second))
                return
            elif nbytes > INLINE_BYTES:
                self._transfer(exposed, kind, source, number, offset, nbytes)
                return
            elif kind == PUT:
                data = (ctypes.c_char * nbytes).from_buffer(frame, REQUEST.size)
                ctypes.memmove(exposed.address + offset, data, nbytes)
            elif kind == GET:
                self._reply(source, number, DONE, 0, ctypes.string_at(exposed.address + offset, nbytes))
                return
        self._reply(source, number, DONE)

    def _transfer(self, exposed: ExposedPart, kind: int, source: int, number: int, offset: int, nbytes: int) -> None:
        """Begin to move bytes straight into or out of the memory; reply when they have moved."""
        memory = [MPI.buffer.fromaddress(exposed.address + offset, nbytes), MPI.BYTE]
        exposed.busy += 1

        def after(well: bool) -> None:
            with exposed.lock:
                exposed.busy -= 1
                outcome = DONE if exposed.open else GONE
            if well:
                self._reply(source, number, outcome)

        if kind == GET:
            request = self._comm.Isend(memory, source, data_tag(number))
        else:
            request = self._comm.Irecv(memory, source, data_tag(number))
            self._reply(source, number, GO)
        self._transfers.append(_Transfer(request, exposed.memory.held, after))

    def _reply(self, source: int, number: int, outcome: int, value: int = 0, data: bytes = b"") -> None:
        text = REPLY.pack(outcome, number, value) + data
        request = self._comm.Isend([text, MPI.BYTE], source, reply_tag(number))
        self._transfers.append(_Transfer(request, text, lambda _: None))


server = Server()
