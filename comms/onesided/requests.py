"""One-sided access by requests: the process that owns the memory carries them out, and replies.

A request is a head and, for a put, its bytes; a reply is a head and, for a get, the bytes. Both have at most
`PIECE_BYTES` of them, so a large transfer is several requests under way at once. The owner takes its memory's lock
around each: after `withdraw` nothing touches the memory. The bytes of a get that was given up are dropped.

A backend gives a `Channel`. Bounds, numbers, signals and the end are here, once for all of them.

`RequestWindow` is a window over it. A call is complete at the target when it returns. Over a channel with
`posted_bytes`, small puts and signals return when they have left, and `flush` when they have arrived. A target may
compute or sleep; a stopped one answers nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import secrets
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.system.waiting import Wait, change
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Transport, WindowMemory, closed_here, closed_there, gather_bytes
from holdfast.comms.transport.liveness import PeerWatch

PIECE_BYTES = 1 << 20
_PIECES = 8
_LOOK_SECONDS = 0.002

PUT, GET, ADD, SWAP, SIGNAL, CLOSED, REPLY = range(7)
DONE, GONE, REFUSED = range(3)
HEAD = struct.Struct("=BQQBQQqq")

Source = Any
"""A rank, or what the channel needs to reach a process without one."""

_log = logging.getLogger("holdfast.backends")


class Head(NamedTuple):
    """The head of a message. `detail` is the width of an atomic's integer, or the outcome in a reply.

    `first` of a put is 1 if it is posted, and of a signal the number of posted puts of its rank before it.
    """

    kind: int
    region: int
    number: int = 0
    detail: int = 0
    offset: int = 0
    nbytes: int = 0
    first: int = 0
    second: int = 0

    def encode(self) -> bytes:
        return HEAD.pack(*self)

    @staticmethod
    def decode(text: bytes | bytearray) -> Head:
        return Head._make(HEAD.unpack(text))

    def fault(self, exposed: Exposed, body_bytes: int) -> str:
        """What is wrong with a request that has `body_bytes` on this memory; "" if nothing is."""
        room = exposed.memory.nbytes
        if not PUT <= self.kind <= SIGNAL or (self.kind == SIGNAL and not exposed.signalled):
            return f"{self.kind} is not a kind of request"
        if self.kind in (ADD, SWAP) and self.detail not in (4, 8):
            return f"an integer of {self.detail} bytes"
        if self.kind in (PUT, ADD, SWAP) and not exposed.writable:
            return "a change of read-only memory"
        size = self.detail if self.kind in (ADD, SWAP) else self.nbytes
        if size > PIECE_BYTES or self.offset + size > room:
            return f"{size} bytes at {self.offset} of {room} bytes"
        expected = self.nbytes if self.kind == PUT else 0
        return "" if body_bytes == expected else f"{body_bytes} bytes of data, where {expected} belong"


class Channel(ABC):
    """What a backend gives: messages, each a head and a body, in order between two ranks.

    It calls `Requests.received` from a thread of its own, or from `poll`.
    """

    posted_bytes: ClassVar[int] = -1
    """Puts of up to this size, and signals, return once they have left; -1: each call waits for its reply."""
    broken: set[Source]
    """Whose connection ended before they said goodbye."""

    @abstractmethod
    def send(self, to: Source, head: bytes, body: bytes | memoryview = b"") -> None:
        """Begin to send; returns at once. `body` stays as it is until the reply. Does nothing if `to` is gone."""

    def bell(self) -> threading.Lock | None:
        """A lock that a thread waits for; None if waiting threads take in messages themselves, by `poll`."""
        bell = threading.Lock()
        bell.acquire()
        return bell

    def take(self) -> None:  # noqa: B027
        """Take in what has arrived, unless a thread of the channel does that alone."""

    def poll(self, pending: Pending) -> bool:
        """Whether a request is answered; takes in what has arrived, or waits a moment for the thread to do it."""
        return pending.answered or (pending.bell is not None and pending.bell.acquire(timeout=_LOOK_SECONDS))

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the others, and release everything. `received` is not called any more."""


class Owner(ABC):
    """The process that requests go to: `to` is where the channel finds it."""

    to: Source

    @abstractmethod
    def check_live(self) -> None:
        """Raise if it cannot answer any more."""

    @abstractmethod
    def error(self, outcome: int, op: str) -> HoldfastError:
        """The error for an outcome that is not DONE."""

    @abstractmethod
    def late(self, op: str, seconds: float) -> OpTimeout:
        """The error for a reply that has not come in time."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request without an answer. The bytes of a get go to the address `into`, in memory that `keep` keeps."""

    owner: Owner
    number: int
    nbytes: int = 0
    into: int = 0
    keep: object = None
    bell: threading.Lock | None = None
    """Held until the answer; for a channel whose thread takes that in."""
    answered: bool = False
    outcome: int = GONE
    value: int = 0


class Exposed:
    """Memory of this process that others access. `lock` is held around each change.

    For a window also what its other ranks sent: whether they have closed theirs, and signals. A signal counts once the
    posted puts of its rank before it are done.
    """

    def __init__(self, memory: ExposedMemory, writable: bool = True, size: int = 0) -> None:
        self.lock = threading.Lock()
        self.memory, self.writable = memory, writable
        self.open = True
        self.busy = 0
        """The puts whose bytes arrive straight in the memory now."""
        self.closed = [False] * size
        self.signalled = [0] * size
        self._posted = [0] * size
        self._early: list[list[int]] = [[] for _ in range(size)]

    def carry_out(self, source: Source, request: Head, body: Any) -> tuple[int, bytes]:
        """Carry out a checked request; returns the value and the bytes of its reply. The lock is held."""
        address = self.memory.address + request.offset
        if request.kind in (ADD, SWAP):
            return change(address, request.detail, request.kind == ADD, request.first, request.second), b""
        if request.kind == GET:
            return 0, ctypes.string_at(address, request.nbytes) if request.nbytes else b""
        if request.kind == SIGNAL:
            self._early[source].append(request.first)
        elif request.nbytes and (arrived := address_of(body)) != address:
            ctypes.memmove(address, arrived, request.nbytes)
        elif request.nbytes:
            self.busy -= 1
        if self.signalled:
            self._count_signals(source, request.first if request.kind == PUT else 0)
        return 0, b""

    def _count_signals(self, source: int, posted: int) -> None:
        self._posted[source] += posted
        if early := self._early[source]:
            later = [puts for puts in early if puts > self._posted[source]]
            self.signalled[source] += len(early) - len(later)
            early[:] = later


class Requests:
    """Both sides of a channel: the requests of this process, and those of others on its memory."""

    def __init__(self, open_channel: Callable[[Requests], Channel]) -> None:
        self._exposed: dict[int, Exposed] = {}
        self._numbers = itertools.count(secrets.randbits(62))
        self._pending: dict[int, Pending] = {}
        self._arriving = threading.RLock()
        self._wait = Wait(yields=2000, sleep_seconds=0.0001)
        self.channel = open_channel(self)

    def expose(self, region: int, exposed: Exposed) -> None:
        self._exposed[region] = exposed

    def withdraw(self, region: int) -> None:
        """Stop exposing memory: when this returns, no request touches it any more."""
        if (exposed := self._exposed.pop(region, None)) is not None:
            with exposed.lock:
                exposed.open = False
                if exposed.busy:
                    exposed.memory.vacate()
                exposed.memory = ExposedMemory(torch.empty(0, device="cpu"))

    # -- requests of this process

    def begin(
        self,
        owner: Owner,
        head: Head,
        body: bytes | memoryview = b"",
        into: int = 0,
        keep: object = None,
    ) -> Pending:
        """Send a request, which gets a number."""
        pending = Pending(owner, next(self._numbers), head.nbytes, into, keep, self.channel.bell())
        self._pending[pending.number] = pending
        self.channel.send(owner.to, HEAD.pack(head.kind, head.region, pending.number, *head[3:]), body)
        return pending

    def wait(self, pending: Pending, deadline: float, op: str) -> int:
        """Wait for the answer to a request; returns its value. Raises `RegionGone`, `OpTimeout`."""
        owner, poll = pending.owner, self.channel.poll
        if not poll(pending):
            self._wait.until(lambda: poll(pending), owner.check_live, deadline, lambda seconds: owner.late(op, seconds))
        if pending.outcome != DONE:
            raise owner.error(pending.outcome, op)
        return pending.value

    def finish(self, pending: Pending, deadline: float, op: str) -> int:
        """As `wait`, and give the request up if it fails."""
        try:
            return self.wait(pending, deadline, op)
        finally:
            if not pending.answered:
                self.forget(pending)

    def forget(self, pending: Pending) -> None:
        """Give a request up: a late answer is discarded."""
        with self._arriving:
            self._pending.pop(pending.number, None)

    def read(
        self, owner: Owner, region: int, offset: int, into: tuple[int, int], keep: object, deadline: float, op: str
    ) -> None:
        """Fill `into`, an address and a size, which `keep` keeps. Without bytes, ask whether the region is open."""
        address, nbytes = into

        def begin(start: int, length: int) -> Pending:
            at = address + start if length else 0
            return self.begin(owner, Head(GET, region, offset=offset + start, nbytes=length), b"", at, keep)

        self._in_pieces(nbytes, begin, deadline, op)

    def write(
        self, owner: Owner, region: int, offset: int, source: tuple[int, int], keep: object, deadline: float, op: str
    ) -> None:
        """Copy `source`, an address and a size, which `keep` keeps, into a region."""
        data = memory_at(*source, keep)

        def begin(start: int, length: int) -> Pending:
            head = Head(PUT, region, offset=offset + start, nbytes=length)
            return self.begin(owner, head, data[start : start + length])

        self._in_pieces(source[1], begin, deadline, op)

    def _in_pieces(self, nbytes: int, begin: Callable[[int, int], Pending], deadline: float, op: str) -> None:
        """Run `begin(start, length)` for each piece, several under way at a time, and wait for all."""
        under_way: deque[Pending] = deque()
        try:
            for start in range(0, nbytes, PIECE_BYTES) or (0,):
                under_way.append(begin(start, min(PIECE_BYTES, nbytes - start)))
                if len(under_way) == _PIECES:
                    self.finish(under_way.popleft(), deadline, op)
            while under_way:
                self.finish(under_way.popleft(), deadline, op)
        finally:
            for pending in under_way:
                self.forget(pending)

    # -- messages of the others

    def room(self, source: Source, text: bytes, nbytes: int) -> memoryview | None:
        """The memory in which a valid put's body belongs, for a channel to receive into; None for all else."""
        if len(text) != HEAD.size or (head := Head.decode(text)).kind != PUT:
            return None
        if not nbytes or (exposed := self._exposed.get(head.region)) is None:
            return None
        with exposed.lock:
            if not exposed.open or exposed.memory.moved or head.fault(exposed, nbytes):
                return None
            exposed.busy += 1
            return memory_at(exposed.memory.address + head.offset, nbytes, exposed.memory.held)

    def received(self, source: Source, text: bytes, body: Any) -> None:
        """Take a message. `body` is a writable buffer, good until this returns; that of `room`, if it gave one."""
        if len(text) != HEAD.size:
            _log.warning("%s sent a window request of %d bytes; it is ignored", _sender(source), len(text))
            return
        head = Head.decode(text)
        if head.kind == REPLY:
            self._take_reply(source, head, body)
        else:
            self._answer(source, head, body)

    def _take_reply(self, source: Source, head: Head, body: Any) -> None:
        with self._arriving:
            pending = self._pending.get(head.number)
            if pending is None or source not in (pending.owner.to, None):
                return
            del self._pending[head.number]
            pending.outcome, pending.value = head.detail, head.first
            if pending.into and head.detail == DONE:
                if len(body) != pending.nbytes:
                    pending.outcome = REFUSED
                elif pending.nbytes:
                    ctypes.memmove(pending.into, address_of(body), pending.nbytes)
        pending.answered = True
        if pending.bell is not None:
            pending.bell.release()

    def _answer(self, source: Source, request: Head, body: Any) -> None:
        """Carry out a request, or refuse it, and reply."""
        exposed = self._exposed.get(request.region)
        if exposed is None:
            self._reply(source, request, GONE)
            return
        with exposed.lock:  # held in the reply, too: it comes before the notice that the memory is withdrawn
            if request.kind == CLOSED and exposed.closed:
                exposed.closed[source] = True
                if request.number:
                    self._reply(source, request, DONE)
            elif not exposed.open or exposed.memory.moved:
                self._reply(source, request, GONE)
            elif fault := request.fault(exposed, len(body)):
                _log.warning("%s sent a request that is refused: %s", _sender(source), fault)
                self._reply(source, request, REFUSED)
            else:
                self._reply(source, request, DONE, *exposed.carry_out(source, request, body))

    def _reply(self, source: Source, request: Head, outcome: int, value: int = 0, body: bytes = b"") -> None:
        head = HEAD.pack(REPLY, request.region, request.number, outcome, 0, 0, value, 0)
        self.channel.send(source, head, body)

    def close(self) -> None:
        self.channel.close()


def _sender(source: Source) -> str:
    return f"rank {source}" if isinstance(source, int) else "another process"


def address_of(body: Any) -> int:
    """The address of a writable buffer that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(body))


def memory_at(address: int, nbytes: int, keep: object) -> memoryview:
    """Memory as a buffer that refers to what keeps it."""
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    array.keep = keep  # type: ignore[attr-defined]
    return memoryview(array)


_SIZE = struct.Struct("=Q")
_MOST_POSTED = 64
"""Posted calls to one rank without an answer; the next one waits for the oldest."""
_EXPLAIN_SECONDS = 0.05
"""How long the end of a connection waits for the death, or the abort, that explains it."""
_LEAVE_SECONDS = 0.3
"""How long `close` waits until the others know of it, where they may have posted puts."""


class RequestService:
    """The windows of one communicator. `open_channel(requests)` connects the ranks; `watch` knows which live."""

    def __init__(self, rank: int, size: int, watch: PeerWatch, open_channel: Callable[[Requests], Channel]) -> None:
        self.rank, self.size, self._watch = rank, size, watch
        self._windows = itertools.count(1)
        self.requests = Requests(open_channel)

    def window(self, transport: Transport, tensor: torch.Tensor, deadline: float) -> RequestWindow:
        """Expose a tensor to all ranks; collective."""
        number, mine = next(self._windows), Exposed(ExposedMemory(tensor), size=self.size)
        self.requests.expose(number, mine)
        try:
            sizes = gather_bytes(transport, _SIZE.pack(tensor.nbytes), deadline)
        except BaseException:
            self.requests.withdraw(number)
            raise
        return RequestWindow(self, number, mine, [_SIZE.unpack(size)[0] for size in sizes])

    def check(self, rank: int) -> None:
        """Raise if `rank` is gone, or the communicator has ended here or elsewhere."""
        self._watch.check(rank)
        if rank in self.requests.channel.broken:
            text = f"rank {rank} has ended its connection, and its window with it; rebuild without it"
            deadline = time.monotonic() + _EXPLAIN_SECONDS
            Wait().until(lambda: False, partial(self._look, rank), deadline, lambda _: RegionGone(text))

    def _look(self, rank: int) -> None:
        self._watch.look()
        self._watch.check(rank)

    def close(self) -> None:
        self.requests.close()


class _Rank(Owner):
    """A rank as the owner of its part of a window."""

    def __init__(self, window: RequestWindow, rank: int) -> None:
        self._window, self.to = window, rank
        self.issued = 0
        """Posted puts."""
        self.posted: deque[Pending] = deque()
        """Posted calls without an answer."""

    def check_live(self) -> None:
        self._window.check_live(self.to)

    def error(self, outcome: int, op: str) -> HoldfastError:
        if outcome == GONE:
            return closed_there(self.to)
        return HoldfastError(f"{op}: rank {self.to} refused the request; its log says why")

    def late(self, op: str, seconds: float) -> OpTimeout:
        return OpTimeout(op, 0, seconds, (self.to,))


class RequestWindow(WindowMemory):
    """See the module. Calls may come from several threads."""

    def __init__(self, service: RequestService, number: int, mine: Exposed, sizes: list[int]) -> None:
        super().__init__(service.size)
        self._service, self._requests = service, service.requests
        self._number, self._mine, self._rank = number, mine, service.rank
        self._posted_bytes = self._requests.channel.posted_bytes
        self._ranks = [_Rank(self, rank) for rank in range(service.size)]
        self._issuing = threading.RLock()
        self.sizes = sizes

    def check_live(self, rank: int) -> None:
        if self._mine.open:  # else it is being closed, and waits for the living to know it
            if self.leaving:
                raise closed_here()
            if self._mine.closed[rank]:
                raise closed_there(rank)
        self._service.check(rank)

    # -- posted calls

    def _post(self, rank: int, kind: int, deadline: float, op: str, offset: int = 0, body: bytes = b"") -> None:
        """Send a small put or a signal; wait for its reply, unless the channel posts such calls."""
        owner, posts = self._ranks[rank], self._posted_bytes >= 0
        with self._issuing:  # a signal follows the puts that it counts
            owner.issued += posts and kind == PUT
            first = owner.issued if kind == SIGNAL else int(posts)
            head = Head(kind, self._number, offset=offset, nbytes=len(body), first=first)
            pending = self._requests.begin(owner, head, body)
            if posts:
                owner.posted.append(pending)
        if posts:
            self._settle(owner, deadline, op, _MOST_POSTED)
        else:
            self._requests.finish(pending, deadline, op)

    def _settle(self, owner: _Rank, deadline: float, op: str, most: int = 0) -> None:
        """Wait until at most so many posted calls have no answer."""
        posted = owner.posted
        while posted:
            try:
                pending = posted[0]
            except IndexError:
                return
            if not pending.answered and len(posted) <= most:
                return
            try:
                self._requests.wait(pending, deadline, op)
            finally:
                if pending.answered:
                    with self._issuing:
                        if posted and posted[0] is pending:
                            posted.popleft()

    # -- the ops

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            ctypes.memmove(self._mine.memory.address + offset, source.data_ptr(), source.nbytes)
        elif 0 < source.nbytes <= self._posted_bytes:
            self._post(rank, PUT, deadline, "put", offset, ctypes.string_at(*span(source)))
        elif source.nbytes:
            owner = self._ranks[rank]
            self._requests.write(owner, self._number, offset, span(source), source, deadline, "put")

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            ctypes.memmove(into.data_ptr(), self._mine.memory.address + offset, into.nbytes)
        elif into.nbytes:
            owner = self._ranks[rank]
            self._settle(owner, deadline, "get")
            self._requests.read(owner, self._number, offset, span(into), into, deadline, "get")

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self._change(ADD, rank, offset, dtype, value, 0, deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._change(SWAP, rank, offset, dtype, expected, desired, deadline)

    def _change(
        self, kind: int, rank: int, offset: int, dtype: torch.dtype, first: int, second: int, deadline: float
    ) -> int:
        self.check_live(rank)
        request = Head(kind, self._number, 0, dtype.itemsize, offset, 0, first, second)
        if rank == self._rank:
            with self._mine.lock:
                return self._mine.carry_out(rank, request, b"")[0]
        owner = self._ranks[rank]
        self._settle(owner, deadline, "atomic")
        return self._requests.finish(self._requests.begin(owner, request), deadline, "atomic")

    def signal(self, rank: int, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            with self._mine.lock:
                self._mine.carry_out(rank, Head(SIGNAL, self._number), b"")
        else:
            self._post(rank, SIGNAL, deadline, "signal")

    def count_signals(self, rank: int) -> int:
        self._requests.channel.take()
        return self._mine.signalled[rank]

    def flush(self, rank: int | None, deadline: float) -> None:
        """Wait until posted calls have arrived; the others are complete when they return."""
        for target in range(len(self.sizes)) if rank is None else (rank,):
            self.check_live(target)
            self._settle(self._ranks[target], deadline, "flush")

    # -- the end

    def close(self) -> None:
        """Withdraw the memory, and tell the others. Where calls are posted, wait until those that live know it."""
        if not self._mine.open:
            return
        self._requests.withdraw(self._number)
        notices, deadline = [], time.monotonic() + _LEAVE_SECONDS
        closed = Head(CLOSED, self._number)
        for rank, owner in enumerate(self._ranks):
            for pending in owner.posted:
                self._requests.forget(pending)
            if rank == self._rank:
                continue
            if self._posted_bytes >= 0 and not self._mine.closed[rank]:
                notices.append(self._requests.begin(owner, closed))
            else:
                self._requests.channel.send(rank, closed.encode())
        for notice in notices:
            with contextlib.suppress(HoldfastError):  # the rank is stopped or gone
                self._requests.finish(notice, deadline, "closing a window")
