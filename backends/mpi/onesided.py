"""Messages for windows over MPI, on a communicator that only the windows use.

A thread of each rank takes them in.

Open MPI has one-sided calls, but documents each of its components for them as unfit for use with faults: over shared
memory they return bytes of dead processes, and elsewhere they wait for an idle target, past any abort. Messages can be
abandoned, and report failures.

That communicator is never revoked, so messages arrive while the ranks' own is, and never freed: Open MPI gives the
number of a freed one to the next, and then loses messages of that one.

The thread polls, every millisecond when nothing has come. It needs the GIL for that, and a stopped process runs none.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from holdfast.backends.mpi.under_way import UnderWay
from holdfast.comms.onesided.requests import HEAD, PIECE_BYTES, Channel, Pending, Requests, Source
from holdfast.comms.system.waiting import yield_cpu

TAG, BODY_TAG = 1 << 30, (1 << 30) + 1
INLINE_BYTES = 4096
"""A longer body is a message of its own."""
_LENGTH = struct.Struct("=I")
_FRAME_BYTES = _LENGTH.size + HEAD.size
_SPINS = 12
_AWAKE_SECONDS = 0.0005
_SLEEP_SECONDS = 0.00005
_PATIENT_SECONDS = 0.05
_LONG_SLEEP_SECONDS = 0.001


@dataclass(slots=True, eq=False)
class _Arrival:
    """A message. A body that was not in its frame is None until it is matched; `request` then receives it."""

    head: bytes
    body: Any = None
    request: MPI.Request | None = None


class MpiChannel(Channel):
    """See the module."""

    def __init__(self, comm: MPI.Intracomm, requests: Requests) -> None:
        self.broken: set[int] = set()
        self._comm, self._requests = comm, requests
        self._sending, self._taking = threading.RLock(), threading.Lock()
        self._leaving, self._receiving = UnderWay(), UnderWay()
        self._arriving: dict[int, deque[_Arrival]] = {}
        self._spare: list[bytearray] = []
        self._status = MPI.Status()
        self._polled = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="holdfast-mpi-windows", daemon=True)
        self._thread.start()

    # -- sending

    def send(self, to: Source, head: bytes, body: bytes | memoryview = b"") -> None:
        whole = len(body) <= INLINE_BYTES
        frame = b"".join((_LENGTH.pack(len(body)), head, body if whole else b""))
        with self._sending:  # bodies leave in the order of their heads
            try:
                self._leaving.begin(self._comm.Isend, ([frame, MPI.BYTE], to, TAG), frame)
                if not whole:
                    self._leaving.begin(self._comm.Isend, ([body, MPI.BYTE], to, BODY_TAG), body)
            except MPI.Exception:
                self.broken.add(to)
            self._leaving.settle()

    # -- receiving

    def bell(self) -> None:
        return None

    def poll(self, pending: Pending) -> bool:
        self._polled = time.monotonic()
        for _ in range(_SPINS):
            if pending.answered:
                return True
            self._take()
        return pending.answered

    def take(self) -> None:
        self._polled = time.monotonic()
        self._take()

    def _take(self) -> bool:
        """Take in what has arrived; whether there was something, or something is on its way."""
        if not self._taking.acquire(blocking=False):
            return False
        try:
            worked = self._next_message()
            for source, arrivals in self._arriving.items():
                self._match_bodies(source, arrivals)
                while arrivals and self._has_arrived(source, arrivals):
                    worked = True
        except MPI.Exception:
            self._comm.Ack_failed(self._comm.size)  # else a receive from any source raises for the dead
            return False
        finally:
            self._taking.release()
        if self._leaving.requests:
            with self._sending:
                self._leaving.settle()
        return worked or bool(self._leaving.requests) or any(self._arriving.values())

    def _next_message(self) -> bool:
        message: Any = self._comm.Improbe(MPI.ANY_SOURCE, TAG, self._status)
        if message is None:
            return False
        source, frame = self._status.Get_source(), bytearray(self._status.Get_count(MPI.BYTE))
        message.Recv([frame, MPI.BYTE])
        arrivals = self._arriving.setdefault(source, deque())
        nbytes = _LENGTH.unpack_from(frame)[0] if len(frame) >= _FRAME_BYTES else 0
        head, body = bytes(frame[_LENGTH.size : _FRAME_BYTES]), memoryview(frame)[_FRAME_BYTES:]
        if arrivals or nbytes > INLINE_BYTES:
            arrivals.append(_Arrival(head, None if nbytes > INLINE_BYTES else body))
        else:
            self._requests.received(source, head, body)
        return True

    def _match_bodies(self, source: int, arrivals: deque[_Arrival]) -> None:
        """Begin to receive the bodies that have come, each with the room that it has, whatever its head announced.

        Open MPI 5 copies a large message whole, past the end of a shorter receive.
        """
        for arrival in arrivals:
            if arrival.body is not None:
                continue
            message: Any = self._comm.Improbe(source, BODY_TAG, self._status)
            if message is None:
                return
            nbytes = self._status.Get_count(MPI.BYTE)
            arrival.body = self._requests.room(source, arrival.head, nbytes) or self._buffer(nbytes)
            arrival.request = self._receiving.begin(message.Irecv, ([arrival.body, MPI.BYTE],), arrival.body)

    def _has_arrived(self, source: int, arrivals: deque[_Arrival]) -> bool:
        """Whether the first message is complete; passes it on."""
        first = arrivals[0]
        try:
            if first.body is None or (first.request is not None and not first.request.Test()):
                return False
        except MPI.Exception:
            self.broken.add(source)
            arrivals.clear()
            return False
        arrivals.popleft()
        self._receiving.forget_completed()
        self._requests.received(source, first.head, first.body)
        if isinstance(first.body.obj, bytearray) and len(first.body.obj) == PIECE_BYTES:
            self._spare.append(first.body.obj)
        return True

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory for a body: of this channel's, unless the body is longer than any that it sends."""
        spare = self._spare.pop() if self._spare and nbytes <= PIECE_BYTES else bytearray(max(nbytes, PIECE_BYTES))
        return memoryview(spare)[:nbytes]

    def _run(self) -> None:
        active = time.monotonic()
        while not self._ended:
            now = time.monotonic()
            if now - self._polled < _AWAKE_SECONDS:  # a waiting thread takes in messages; two would delay each other
                time.sleep(_AWAKE_SECONDS)
                continue
            if self._take():
                active = now
            if now - active < _AWAKE_SECONDS:
                yield_cpu()
            else:
                time.sleep(_SLEEP_SECONDS if now - active < _PATIENT_SECONDS else _LONG_SLEEP_SECONDS)

    # -- the end

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        with self._sending:
            self._leaving.abandon()
        self._receiving.abandon()
        self._arriving.clear()
