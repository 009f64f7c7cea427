"""Windows by requests and replies (`requests`), between the ranks of a communicator.

A call is complete at the target when it returns. Over a channel with `posted_bytes`, small puts and signals return when
they have left, and `flush` when they have arrived. A target may compute or sleep; a stopped one answers nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.onesided.peer_watch import PeerWatch
from holdfast.comms.onesided.requests import (
    ADD,
    CLOSED,
    GONE,
    PUT,
    SIGNAL,
    SWAP,
    Channel,
    Exposed,
    Head,
    Owner,
    Pending,
    Requests,
)
from holdfast.comms.system.cpu_wait import Wait
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Transport, gather_bytes
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

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
