"""Windows by requests: the rank that owns the memory carries them out on a thread, and replies.

A request is a head and, for a put, its bytes; a reply is a head and, for a get, the bytes. Both have at most
`PIECE_BYTES` of them, so a large transfer is several requests under way at once. The owner takes its window's lock
around each: after `close` nothing touches the memory, and no reply follows the notice of the close. The bytes of a get
that was given up reach nobody. Every call is complete at the target, too, when it returns.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import secrets
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import torch

from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.onesided.peer_watch import PeerWatch
from holdfast.comms.system.cpu_wait import change
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Transport
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

PIECE_BYTES = 1 << 20
_PIECES = 4
_LOOK_SECONDS = 0.002

PUT, GET, ADD, SWAP, SIGNAL, CLOSED, REPLY = range(7)
DONE, GONE, REFUSED = range(3)
HEAD = struct.Struct("=BBxxIQQQqq")

Received = Callable[[int, bytes, bytearray], None]

_log = logging.getLogger("holdfast.backends")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a message. `detail` is the width of an atomic's integer, or the outcome in a reply."""

    kind: int
    window: int
    number: int = 0
    detail: int = 0
    offset: int = 0
    nbytes: int = 0
    first: int = 0
    second: int = 0

    def encode(self) -> bytes:
        return HEAD.pack(
            self.kind, self.detail, self.window, self.number, self.offset, self.nbytes, self.first, self.second
        )

    @staticmethod
    def decode(text: bytes) -> Head:
        kind, detail, window, number, offset, nbytes, first, second = HEAD.unpack(text)
        return Head(kind, window, number, detail, offset, nbytes, first, second)

    def fault(self, room: int, body_bytes: int) -> str:
        """What is wrong with a request on `room` bytes of memory that has `body_bytes`; "" if nothing is."""
        if not PUT <= self.kind <= SIGNAL:
            return f"{self.kind} is no kind of request"
        if self.kind in (ADD, SWAP) and self.detail not in (4, 8):
            return f"an integer of {self.detail} bytes"
        size = self.detail if self.kind in (ADD, SWAP) else self.nbytes
        if size > PIECE_BYTES or self.offset + size > room:
            return f"{size} bytes at {self.offset} of a window of {room} bytes"
        expected = self.nbytes if self.kind == PUT else 0
        return "" if body_bytes == expected else f"{body_bytes} bytes of data, where {expected} belong"


class Channel(ABC):
    """What a backend gives: frames, each a head and a body, in order between two ranks.

    A thread of the channel calls `received(rank, head, body)`; it must not raise.
    """

    broken: Set[int]
    """The ranks that ended their connection before they said goodbye."""

    @abstractmethod
    def send(self, rank: int, head: bytes, body: bytes | memoryview = b"") -> None:
        """Begin to send; returns at once. `body` must stay as it is until then. Does nothing if the rank is gone."""

    @abstractmethod
    def shut_down(self) -> None:
        """Tell the others that this rank aborts, and end all connections. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye to the others, and release everything. `received` is not called any more."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request without an answer. The bytes of a get go to the address `into`, in memory that `keep` keeps."""

    rank: int
    nbytes: int = 0
    into: int = 0
    keep: object = None
    answered: threading.Event = field(default_factory=threading.Event)
    outcome: int = GONE
    value: int = 0


class _Exposed:
    """This rank's part of a window, and what the others wrote about theirs. `lock` is held around each change."""

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self.lock = threading.Lock()
        self.memory = ExposedMemory(tensor)
        self.open = True
        self.closed = [False] * size
        self.signalled = [0] * size

    def carry_out(self, source: int, request: Head, body: bytes | bytearray) -> tuple[int, bytes]:
        """Carry out a checked request; returns the value and the bytes of its reply. The lock is held."""
        address = self.memory.address + request.offset
        if request.kind in (ADD, SWAP):
            return change(address, request.detail, request.kind == ADD, request.first, request.second), b""
        if request.kind == GET:
            return 0, ctypes.string_at(address, request.nbytes)
        if request.kind == SIGNAL:
            self.signalled[source] += 1
        elif body:
            ctypes.memmove(address, (ctypes.c_char * len(body)).from_buffer(body), len(body))
        return 0, b""


class RequestService:
    """The windows of one communicator: its requests to other ranks, and theirs to it.

    `open_channel(received)` connects the ranks; `watch` knows which of them live.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        watch: PeerWatch,
        open_channel: Callable[[Received], Channel],
    ) -> None:
        self.rank, self.size, self._watch = rank, size, watch
        self._windows: dict[int, _Exposed] = {}
        self._window_numbers, self._numbers = itertools.count(1), itertools.count(secrets.randbits(62))
        self._pending: dict[int, _Pending] = {}
        self._arriving = threading.Lock()
        self.channel = open_channel(self._received)

    def window(self, transport: Transport, tensor: torch.Tensor, deadline: float) -> RequestWindow:
        """Expose a tensor to all ranks; collective."""
        number, mine = next(self._window_numbers), _Exposed(tensor, self.size)
        self._windows[number] = mine
        try:
            sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            transport.all_gather(sizes, torch.tensor([tensor.nbytes], device="cpu"), deadline)
        except BaseException:
            self.drop(number)
            raise
        return RequestWindow(self, number, mine, [int(size) for size in sizes])

    def drop(self, number: int) -> None:
        self._windows.pop(number, None)

    def check(self, rank: int) -> None:
        """Raise if `rank` is gone, or the communicator has ended here or elsewhere."""
        self._watch.check(rank)
        if rank in self.channel.broken:
            raise RegionGone(f"rank {rank} has ended its connection, and its window with it; rebuild without it")

    # -- requests of this rank

    def begin(self, pending: _Pending, request: Head, body: bytes | memoryview = b"") -> int:
        """Send a request; returns its number."""
        number = next(self._numbers)
        self._pending[number] = pending
        head = Head(
            request.kind,
            request.window,
            number,
            request.detail,
            request.offset,
            request.nbytes,
            request.first,
            request.second,
        )
        self.channel.send(pending.rank, head.encode(), body)
        return number

    def forget(self, number: int) -> None:
        """Give a request up: a late answer is discarded."""
        with self._arriving:
            self._pending.pop(number, None)

    # -- messages of the others, on the channel's thread

    def _received(self, source: int, text: bytes, body: bytearray) -> None:
        head = Head.decode(text)
        if head.kind == REPLY:
            self._take_reply(source, head, body)
        elif head.kind == CLOSED:
            if (exposed := self._windows.get(head.window)) is not None:
                with exposed.lock:
                    exposed.closed[source] = True
        else:
            self._answer(source, head, body)

    def _take_reply(self, source: int, head: Head, body: bytearray) -> None:
        with self._arriving:
            pending = self._pending.get(head.number)
            if pending is None or pending.rank != source:
                return
            del self._pending[head.number]
            pending.outcome, pending.value = head.detail, head.first
            if pending.into and head.detail == DONE:
                if len(body) == pending.nbytes:
                    ctypes.memmove(pending.into, (ctypes.c_char * len(body)).from_buffer(body), len(body))
                else:
                    pending.outcome = REFUSED
        pending.answered.set()

    def _answer(self, source: int, request: Head, body: bytearray) -> None:
        """Carry out a request, or refuse it, and reply."""
        exposed = self._windows.get(request.window)
        if exposed is None:
            self._reply(source, request, GONE)
            return
        with exposed.lock:
            if not exposed.open or exposed.memory.moved:
                self._reply(source, request, GONE)
            elif fault := request.fault(exposed.memory.nbytes, len(body)):
                _log.warning("rank %d sent a window request that is refused: %s", source, fault)
                self._reply(source, request, REFUSED)
            else:
                self._reply(source, request, DONE, *exposed.carry_out(source, request, body))

    def _reply(self, source: int, request: Head, outcome: int, value: int = 0, body: bytes = b"") -> None:
        head = Head(REPLY, request.window, request.number, outcome, first=value)
        self.channel.send(source, head.encode(), body)

    def close(self) -> None:
        self.channel.close()


class RequestWindow(WindowMemory):
    """See the module. Calls may come from several threads."""

    def __init__(self, service: RequestService, number: int, mine: _Exposed, sizes: list[int]) -> None:
        super().__init__(service.size)
        self._service, self._number, self._mine, self._rank = service, number, mine, service.rank
        self.sizes = sizes

    def check_live(self, rank: int) -> None:
        if self.leaving:
            raise closed_here()
        if self._mine.closed[rank]:
            raise closed_there(rank)
        self._service.check(rank)

    # -- requests

    def _await(self, number: int, pending: _Pending, deadline: float, op: str) -> int:
        """Wait for the answer to a request; returns its value. Raises `RegionGone`, `OpTimeout`."""
        began = time.monotonic()
        try:
            while not pending.answered.wait(_LOOK_SECONDS):
                try:
                    self.check_live(pending.rank)
                except HoldfastError:
                    if pending.answered.is_set():  # it came between the two looks, before the rank closed
                        break
                    raise
                if time.monotonic() >= deadline:
                    raise OpTimeout(op, 0, time.monotonic() - began, (pending.rank,))
        finally:
            self._service.forget(number)
        if pending.outcome == GONE:
            raise closed_there(pending.rank)
        if pending.outcome == REFUSED:
            raise HoldfastError(f"{op}: rank {pending.rank} refused the request; its log says why")
        return pending.value

    def _call(self, request: Head, rank: int, deadline: float, op: str) -> int:
        """Carry out a request without bytes, here or there; returns its value."""
        self.check_live(rank)
        if rank == self._rank:
            with self._mine.lock:
                return self._mine.carry_out(rank, request, b"")[0]
        pending = _Pending(rank)
        return self._await(self._service.begin(pending, request), pending, deadline, op)

    def _in_pieces(
        self, nbytes: int, begin: Callable[[int, int], tuple[int, _Pending]], deadline: float, op: str
    ) -> None:
        """Run `begin(start, length)` for each piece, several under way at a time, and wait for all."""
        under_way: deque[tuple[int, _Pending]] = deque()
        try:
            for start in range(0, nbytes, PIECE_BYTES):
                under_way.append(begin(start, min(PIECE_BYTES, nbytes - start)))
                if len(under_way) == _PIECES:
                    self._await(*under_way.popleft(), deadline, op)
            while under_way:
                self._await(*under_way.popleft(), deadline, op)
        finally:
            for number, _ in under_way:
                self._service.forget(number)

    # -- the ops

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            ctypes.memmove(self._mine.memory.address + offset, source.data_ptr(), source.nbytes)
            return
        data = source.detach().view(-1).view(torch.uint8).numpy().data

        def begin(start: int, length: int) -> tuple[int, _Pending]:
            pending = _Pending(rank)
            request = Head(PUT, self._number, offset=offset + start, nbytes=length)
            return self._service.begin(pending, request, data[start : start + length]), pending

        self._in_pieces(source.nbytes, begin, deadline, "put")

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        self.check_live(rank)
        if rank == self._rank:
            ctypes.memmove(into.data_ptr(), self._mine.memory.address + offset, into.nbytes)
            return

        def begin(start: int, length: int) -> tuple[int, _Pending]:
            pending = _Pending(rank, length, into.data_ptr() + start, into)
            return self._service.begin(pending, Head(GET, self._number, offset=offset + start, nbytes=length)), pending

        self._in_pieces(into.nbytes, begin, deadline, "get")

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        request = Head(ADD, self._number, detail=dtype.itemsize, offset=offset, first=value)
        return self._call(request, rank, deadline, "atomic")

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        request = Head(SWAP, self._number, detail=dtype.itemsize, offset=offset, first=expected, second=desired)
        return self._call(request, rank, deadline, "atomic")

    def signal(self, rank: int, deadline: float) -> None:
        self._call(Head(SIGNAL, self._number), rank, deadline, "signal")

    def count_signals(self, rank: int) -> int:
        return self._mine.signalled[rank]

    def flush(self, rank: int | None, deadline: float) -> None:
        """Check that the targets are live; calls are complete when they return."""
        for target in range(len(self.sizes)) if rank is None else (rank,):
            self.check_live(target)

    def close(self) -> None:
        mine = self._mine
        with mine.lock:
            if not mine.open:
                return
            mine.open = False
            mine.memory = ExposedMemory(torch.empty(0, device="cpu"))
        self._service.drop(self._number)
        notice = Head(CLOSED, self._number).encode()
        for rank in range(len(self.sizes)):
            if rank != self._rank:
                self._service.channel.send(rank, notice)
