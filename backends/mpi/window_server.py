"""The thread that serves a rank's windows over MPI: it answers the others' requests on this rank's memory.

Open MPI has one-sided calls, but documents each of its components for them as unfit for use with faults: over shared
memory they return bytes of dead processes, and elsewhere they wait for an idle target, past any abort. Messages can be
abandoned and revoked, and report failures, so windows use messages.

A request is a frame on one tag of a communicator that only the windows use. Its reply comes on a tag of its own number;
so do the bytes of large puts and gets, straight out of and into the exposed memory. That communicator is never revoked,
so messages arrive while the ranks' own is, and never freed: Open MPI gives the number of a freed one to the next, and
then loses messages of that one.

The server answers each request once: a request that it cannot carry out is refused, and the server goes on. It replies
while it holds the window's lock, so a reply comes before the notice that the window is closed.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mpi4py import MPI

from holdfast.comms.system.cpu_wait import change, yield_cpu
from holdfast.comms.tensors.exposed import ExposedMemory

PUT, GET, ADD, SWAP, SIGNAL, FLUSH, CLOSED = range(7)
DONE, GO, GONE, REFUSED = range(4)
REQUEST = struct.Struct("=BIQqqqqq")
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

_log = logging.getLogger("holdfast.backends")


class WindowRequest(NamedTuple):
    """The head of a frame. The bytes of a small put follow it."""

    kind: int
    window: int
    number: int
    offset: int = 0
    nbytes: int = 0
    itemsize: int = 0
    first: int = 0
    second: int = 0

    def encode(self) -> bytes:
        return REQUEST.pack(*self)

    @staticmethod
    def decode(frame: bytearray) -> WindowRequest | None:
        """The head of a frame; None if the frame is too short for one."""
        return WindowRequest(*REQUEST.unpack_from(frame)) if len(frame) >= REQUEST.size else None

    def fault(self, room: int, data_bytes: int) -> str:
        """The fault of a request on `room` bytes of memory, with `data_bytes` behind its head; "" if there is none."""
        if not 0 <= self.kind <= CLOSED:
            return f"{self.kind} is no kind of request"
        if self.kind in (ADD, SWAP) and self.itemsize not in (4, 8):
            return f"an integer of {self.itemsize} bytes"
        size = self.itemsize if self.kind in (ADD, SWAP) else self.nbytes
        if self.offset < 0 or size < 0 or self.offset + size > room:
            return f"{size} bytes at {self.offset} of a window of {room} bytes"
        expected = self.nbytes if self.kind == PUT and self.nbytes <= INLINE_BYTES else 0
        return "" if data_bytes == expected else f"{data_bytes} bytes of data, where {expected} belong"


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


class WindowServer:
    """The thread that serves the windows of one communicator; `comm` is its own, with the same ranks."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._windows: dict[int, ExposedPart] = {}
        self._transfers: list[_Transfer] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-mpi-windows", daemon=True)
        self._thread.start()

    def add(self, number: int, exposed: ExposedPart) -> None:
        """Serve a window."""
        self._windows[number] = exposed

    def drop(self, number: int) -> None:
        self._windows.pop(number, None)

    def close(self) -> Sequence[tuple[MPI.Request, object]]:
        """Stop the thread; returns the transfers that it left, with their memory."""
        self._stop.set()
        self._thread.join()
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
        source = status.Get_source()
        request = WindowRequest.decode(frame)
        if request is None:
            _log.warning("rank %d sent a window request of %d bytes; it is ignored", source, len(frame))
        elif request.kind == CLOSED:
            if (exposed := self._windows.get(request.window)) is not None:
                with exposed.lock:
                    exposed.closed[source] = True
        else:
            self._answer(source, request, frame)
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

    def _answer(self, source: int, request: WindowRequest, frame: bytearray) -> None:
        """Carry out a request, or refuse it, and reply."""
        exposed = self._windows.get(request.window)
        if exposed is None:
            self._reply(source, request, GONE)
            return
        with exposed.lock:
            if not exposed.open or exposed.memory.moved:
                self._reply(source, request, GONE)
            elif fault := request.fault(exposed.memory.nbytes, len(frame) - REQUEST.size):
                _log.warning("rank %d sent a window request that is refused: %s", source, fault)
                self._reply(source, request, REFUSED)
            elif request.nbytes > INLINE_BYTES:
                self._transfer(source, request, exposed)
            else:
                self._reply(source, request, DONE, *self._carry_out(source, request, frame, exposed))

    def _carry_out(
        self, source: int, request: WindowRequest, frame: bytearray, exposed: ExposedPart
    ) -> tuple[int, bytes]:
        """Carry out a checked request without a transfer; returns the value and the data of its reply."""
        kind, offset, nbytes = request.kind, request.offset, request.nbytes
        if kind in (ADD, SWAP):
            return exposed.change(kind, offset, request.itemsize, request.first, request.second), b""
        if kind == GET:
            return 0, ctypes.string_at(exposed.address + offset, nbytes)
        if kind == PUT and nbytes:
            data = (ctypes.c_char * nbytes).from_buffer(frame, REQUEST.size)
            ctypes.memmove(exposed.address + offset, data, nbytes)
        elif kind == SIGNAL:
            exposed.signalled[source] += 1
        return 0, b""

    def _transfer(self, source: int, request: WindowRequest, exposed: ExposedPart) -> None:
        """Begin to move bytes straight into or out of the memory; reply when they have moved."""
        memory = [MPI.buffer.fromaddress(exposed.address + request.offset, request.nbytes), MPI.BYTE]

        def after(well: bool) -> None:
            with exposed.lock:
                exposed.busy -= 1
                self._reply(source, request, DONE if well and exposed.open else GONE)

        if request.kind == GET:
            transfer = self._comm.Isend(memory, source, data_tag(request.number))
        else:
            transfer = self._comm.Irecv(memory, source, data_tag(request.number))
            self._reply(source, request, GO)
        exposed.busy += 1
        self._transfers.append(_Transfer(transfer, exposed.memory.held, after))

    def _reply(self, source: int, request: WindowRequest, outcome: int, value: int = 0, data: bytes = b"") -> None:
        text = REPLY.pack(outcome, request.number, value) + data
        try:
            sent = self._comm.Isend([text, MPI.BYTE], source, reply_tag(request.number))
        except MPI.Exception:
            return  # the rank is gone
        self._transfers.append(_Transfer(sent, text, lambda _: None))
