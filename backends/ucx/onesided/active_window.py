"""Windows by active messages, as over TCP: the progress thread of the target answers.

A target may compute or sleep, but a stopped one delays gets, atomics and flushes until they time out. Puts and signals
return when they have left; `flush` returns when they have arrived. A signal carries the number of writes of its rank
before it, and is counted once they have been done.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass

import torch

from holdfast.backends.ucx import libucp
from holdfast.backends.ucx.onesided import active_messages
from holdfast.backends.ucx.onesided.active_messages import (
    PIECE_BYTES,
    PIECES,
    ActiveMessages,
    ActiveRequest,
    ExposedRange,
    in_pieces,
)
from holdfast.backends.ucx.onesided.window import UcxWindow
from holdfast.backends.ucx.onesided.worker import OneSidedWorker, exchange
from holdfast.backends.ucx.worker import Endpoint, Transports, UcxWorker
from holdfast.comms.errors import RegionGone
from holdfast.comms.transport.base import Transport


class ActiveSide(OneSidedWorker):
    """The one-sided worker of a rank that has its requests carried out by its peers."""

    messages: ActiveMessages

    def _make_worker(self, over: Transports) -> UcxWorker:
        worker = UcxWorker(libucp.FEATURE_AM, over, lambda rank, why: self._broken.add(rank))
        self.messages = ActiveMessages(worker)
        return worker

    def wait_for(self, ask: ActiveRequest, rank: int, deadline: float, op: str) -> None:
        """Wait for the answer of `rank`. Raises `RegionGone` if it has no such region, or is gone; `OpTimeout`."""
        self.until(lambda: ask.status != active_messages.WAITING, rank, deadline, op)
        if ask.status != active_messages.DONE:
            self.check(rank, now=True)
            raise RegionGone(f"{op}: rank {rank} has closed its window; make another one")

    def wait_until_sent(self, ask: ActiveRequest, rank: int, deadline: float, op: str) -> None:
        """Wait until the memory that `ask` sends may change. Raises `RegionGone`, `OpTimeout`."""

        def sent() -> bool:
            self.messages.sweep()
            return ask.sent

        self.until(sent, rank, deadline, op)


@dataclass(frozen=True, slots=True)
class Target:
    """A rank's part, as this rank accesses it."""

    endpoint: Endpoint
    region: int
    nbytes: int


class ActiveWindow(UcxWindow[ActiveSide, Target]):
    """See the module."""

    def _prepare(self) -> None:
        self._messages = self._side.messages
        self._region = secrets.randbits(63)
        self._mine = [0] * (2 * self._size)
        self._issued = [0] * self._size
        self._done = [0] * self._size
        self._unanswered: list[deque[ActiveRequest]] = [deque() for _ in range(self._size)]
        self._held: list[list[tuple[int, int, int]]] = [[] for _ in range(self._size)]

    def _open(self, transport: Transport, deadline: float) -> None:
        memory = self._exposed
        with self._side.lock:
            self._messages.expose(self._region, ExposedRange(memory, True, self._wrote, self._noted))
        card = self._region.to_bytes(8, "little") + memory.nbytes.to_bytes(8, "little")
        for rank, text in enumerate(exchange(transport, card, deadline)):
            region, nbytes = (int.from_bytes(text[at : at + 8], "little") for at in (0, 8))
            self._parts.append(Target(self._side.endpoints[rank], region, nbytes))

    # -- writes and notes of the others; called with the side's lock held

    def _wrote(self, sender: int) -> None:
        if 0 <= sender < self._size:
            self._done[sender] += 1
            if self._held[sender]:
                self._count_notes(sender)

    def _noted(self, sender: int, word: int, value: int, after: int) -> bool:
        if not 0 <= sender < self._size or word // 2 != sender:
            return False
        self._held[sender].append((word, value, after))
        self._count_notes(sender)
        return True

    def _count_notes(self, sender: int) -> None:
        """Count the notes of this sender that follow only writes that are done now."""
        done, held = self._done[sender], self._held[sender]
        for word, value, after in held:
            if after <= done:
                self._mine[word] = max(self._mine[word], value)
        held[:] = [note for note in held if note[2] > done]

    # -- put and get

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        address, nbytes, side = source.data_ptr(), source.nbytes, self._side
        sending: deque[ActiveRequest] = deque()
        for start in range(0, nbytes, PIECE_BYTES):
            with side.lock:
                ask = self._messages.write(
                    part.endpoint,
                    part.region,
                    offset + start,
                    address + start,
                    min(PIECE_BYTES, nbytes - start),
                    source,
                    self._rank,
                )
                self._issued[rank] += 1
                self._without_answer(rank).append(ask)
            sending.append(ask)
            if len(sending) == PIECES:
                side.wait_for(sending.popleft(), rank, deadline, "put")
        for ask in sending:
            if not ask.sent:
                side.wait_until_sent(ask, rank, deadline, "put")

    def _without_answer(self, rank: int) -> deque[ActiveRequest]:
        """The requests that `flush` waits for. The lock is held."""
        unanswered = self._unanswered[rank]
        while unanswered and unanswered[0].status == active_messages.DONE:
            unanswered.popleft()
        return unanswered

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        address, nbytes, side = into.data_ptr(), into.nbytes, self._side
        self._settle(rank, deadline, "get")

        def begin(start: int, block: int) -> ActiveRequest:
            with side.lock:
                return self._messages.read(part.endpoint, part.region, offset + start, address + start, block)

        def forget(ask: ActiveRequest) -> None:
            with side.lock:
                self._messages.forget(ask)

        if nbytes:
            in_pieces(nbytes, begin, lambda ask: side.wait_for(ask, rank, deadline, "get"), forget)
        self._live(rank)

    def _settle(self, rank: int, deadline: float, op: str) -> None:
        """Wait until the writes that were issued to `rank` have taken effect there."""
        with self._side.lock:
            issued = list(self._without_answer(rank))
        for ask in issued:
            self._side.wait_for(ask, rank, deadline, op)

    # -- atomics

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self._update(rank, active_messages.ADD, offset, dtype, (value, 0), deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._update(rank, active_messages.SWAP, offset, dtype, (expected, desired), deadline)

    def _update(
        self, rank: int, kind: int, offset: int, dtype: torch.dtype, values: tuple[int, int], deadline: float
    ) -> int:
        part = self._live(rank)
        self._settle(rank, deadline, "atomic")
        with self._side.lock:
            ask = self._messages.update(part.endpoint, kind, part.region, offset, dtype.itemsize, values)
        self._side.wait_for(ask, rank, deadline, "atomic")
        return ask.value

    # -- signals, and the end

    def flush(self, rank: int | None, deadline: float) -> None:
        for target in range(self._size) if rank is None else (rank,):
            self._live(target)
            self._settle(target, deadline, "flush")

    def _notify(self, rank: int, part: Target, word: int, value: int, deadline: float, op: str) -> None:
        with self._side.lock:
            ask = self._messages.note(part.endpoint, part.region, self._rank, word, value, self._issued[rank])
            self._without_answer(rank).append(ask)
        self._side.wait_until_sent(ask, rank, deadline, op)

    def _await_delivery(self, rank: int, deadline: float) -> None:
        self._settle(rank, deadline, "closing a window")

    def _poll(self) -> None:
        with self._side.lock:
            while self._worker.progress():
                pass

    def _withdraw(self) -> None:
        with self._side.lock:
            self._messages.withdraw(self._region)
