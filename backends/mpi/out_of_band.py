"""Status messages between the processes of one MPI job, which arrive even when communicators are revoked.

One tag of MPI_COMM_WORLD carries them, so a communicator needs no setup for them. A message is a few bytes, which MPI
sends at once, whether or not the receiver polls.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from mpi4py import MPI

from holdfast.backends.mpi.under_way import UnderWay
from holdfast.comms.errors import UNDECODABLE
from holdfast.comms.system.signal_safety import shared_lock

TAG = 0x486F
_EARLY = 4096
"""The number of messages kept for communicators that this process has not connected yet."""


class StatusMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message of `rank` to the other ranks of the communicator `token`.

    It has `built` its end, `waits` in collective `number`, has `closed` after it, or `aborted` for `reason`.
    """

    token: str
    rank: int
    kind: str
    number: int = 0
    reason: str = ""


class Mailbox:
    """The status messages of this process, sent and received. Thread-safe."""

    def __init__(self) -> None:
        self._lock = shared_lock()
        self._unsent = UnderWay()
        self._boxes: dict[str, list[StatusMessage]] = {}
        self._early: deque[StatusMessage] = deque(maxlen=_EARLY)

    def open(self, token: str) -> None:
        """Collect the messages of a communicator from now on, and those that came before."""
        with self._lock:
            self._boxes[token] = [word for word in self._early if word.token == token]
            self._early = deque((word for word in self._early if word.token != token), _EARLY)

    def close(self, token: str) -> None:
        with self._lock:
            self._boxes.pop(token, None)

    def send(self, word: StatusMessage, processes: Iterable[int]) -> None:
        """Send `word` to these processes of MPI_COMM_WORLD; dead ones do not get it."""
        data = msgspec.msgpack.encode(word)
        with self._lock:
            for process in processes:
                with contextlib.suppress(MPI.Exception):
                    self._unsent.begin(MPI.COMM_WORLD.Isend, ([data, MPI.BYTE], process, TAG), data)
            self._unsent.settle()

    def read(self, token: str) -> list[StatusMessage]:
        """The messages of a communicator since the last call."""
        with self._lock:
            while (message := self._next()) is not None:
                self._sort(message)
            box = self._boxes.get(token, [])
            words = box[:]
            box.clear()
            return words

    def _next(self) -> bytes | None:
        status = MPI.Status()
        try:
            message: Any = MPI.COMM_WORLD.Improbe(MPI.ANY_SOURCE, TAG, status)
        except MPI.Exception:
            MPI.COMM_WORLD.Ack_failed(MPI.COMM_WORLD.size)
            return None
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        try:
            message.Recv([data, MPI.BYTE])
        except MPI.Exception:
            return None
        return bytes(data)

    def _sort(self, data: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(data, type=StatusMessage)
        except UNDECODABLE:
            return  # a message of the user's under the same tag
        if word.token in self._boxes:
            self._boxes[word.token].append(word)
        else:
            self._early.append(word)


mailbox = Mailbox()
