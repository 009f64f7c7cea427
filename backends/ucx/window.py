"""Windows over UCX: every rank's tensor where it lies, registered; and a header in memory of UCX's own.

A header holds what the others say to its rank: two words a peer (has it closed its window; how often it has signalled),
a lock for atomics, and a word a peer that says "I am writing into your memory". How they are written, and how bytes
move, differs: `near_window` over shared memory, `far_window` over a network.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.backends.ucx.leftovers import sweep
from holdfast.backends.ucx.onesided import OneSided, exchange
from holdfast.backends.ucx.regions import Mapping
from holdfast.comms.errors import HoldfastError, OpTimeout, RegionGone
from holdfast.comms.transport import Transport
from holdfast.comms.window import WindowMemory

give_way = ctypes.CDLL(None).sched_yield  # lets go of the GIL, which os.sched_yield does not
YIELDS = 200
SLEEP_SECONDS = 0.0002
LEAVE_SECONDS = 0.3
"""How long `close` waits for peers to hear of it, and for writers in the middle of a block."""
_LEAST_SECONDS = 0.02


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank's header and memory are. `key` is empty for a window without elements."""

    header: int
    header_key: bytes
    memory: int
    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part, as this rank reaches it. `words` is its header if that is mapped here."""

    endpoint: Any
    header: int
    header_key: Any
    words: Any
    memory: int
    key: Any
    nbytes: int


class UcxWindow(WindowMemory):
    """See the module. Calls may come from several threads."""

    def __init__(self, side: OneSided, transport: Transport, tensor: torch.Tensor, deadline: float) -> None:
        sweep()
        side.sweep()
        self._side, self._tensor = side, tensor
        self._worker, self._call = side.worker, side.worker.lib.call
        self._rank, self._size = side.rank, side.size
        self._plain = side.worker.plain
        self._signalling = threading.Lock()
        self._closed = False
        self._parts: list[Part] = []
        self._waited = [0] * side.size
        self._signalled = [0] * side.size
        self._memory: Mapping | None = None
        words = 3 * side.size + 1
        with side.lock:
            self._header = Mapping(side.worker, 8 * words, None)
        ffi = side.worker.lib.ffi
        self._mine = ffi.cast("uint64_t *", self._header.address)
        ffi.memmove(self._mine, bytes(8 * words), 8 * words)
        try:
            with side.lock:
                if tensor.nbytes:
                    self._memory = Mapping(side.worker, tensor.nbytes, tensor.data_ptr())
            memory = self._memory
            card = _Card(
                self._header.address,
                self._header.key,
                memory.address if memory else 0,
                memory.key if memory else b"",
                tensor.nbytes,
            )
            cards = exchange(transport, msgspec.msgpack.encode(card), deadline)
            for rank, text in enumerate(cards):
                self._parts.append(self._reach(rank, msgspec.msgpack.decode(text, type=_Card)))
            self.sizes = [part.nbytes for part in self._parts]
            transport.barrier(deadline)
        except BaseException:
            self._closed = True
            self._let_go()
            raise

    def _reach(self, rank: int, card: _Card) -> Part:
        side = self._side
        with side.lock:
            header_key = side.unpack(rank, card.header_key)
            key = side.unpack(rank, card.key) if card.key else None
            words = self._mapped(header_key, card.header)
        return Part(side.endpoints[rank], card.header, header_key, words, card.memory, key, card.nbytes)

    def _mapped(self, key: Any, header: int) -> Any:
        """A rank's header, mapped into this process; None if it cannot be."""
        return None

    # -- what a call begins with

    def _live(self, rank: int) -> Part:
        if self._mine[2 * rank]:
            raise closed(rank)
        if self._closed:
            raise RegionGone("this rank has closed the window; make another one")
        self._side.check(rank)
        return self._parts[rank]

    # -- signals

    def signal(self, rank: int, deadline: float) -> None:
        part = self._live(rank)
        with self._signalling:
            self._signalled[rank] += 1
            self._tell(rank, part, 2 * self._rank + 1, self._signalled[rank], deadline, "signal")

    @abstractmethod
    def _tell(self, rank: int, part: Part, word: int, value: int, deadline: float, op: str) -> None:
        """Set a word in a rank's header, after all that was issued to it before."""

    def _look(self) -> None:
        """Let what the others say arrive, where that takes this rank's help."""

    def wait_signal(self, rank: int, deadline: float) -> None:
        word, wanted = 2 * rank + 1, self._waited[rank] + 1
        began, turns = time.monotonic(), 0
        while self._mine[word] < wanted:
            self._live(rank)
            self._look()
            turns += 1
            if turns < YIELDS:
                give_way()
                continue
            if time.monotonic() >= deadline:
                raise OpTimeout("wait_signal", wanted, time.monotonic() - began, (rank,))
            time.sleep(SLEEP_SECONDS)
        self._waited[rank] = wanted

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._say_closed()
        finally:
            self._let_go()

    def _say_closed(self) -> None:
        """Tell all that live; they have heard when this returns, unless they were stopped."""
        until = time.monotonic() + LEAVE_SECONDS
        self._mine[2 * self._rank] = 1
        try:
            dead = self._side.look()
        except HoldfastError:
            dead = frozenset()
        for told in (False, True):
            for rank in range(self._size):
                if rank == self._rank or rank in dead:
                    continue
                limit = max(until, time.monotonic() + _LEAST_SECONDS)
                try:
                    if told:
                        self._hear(rank, limit)
                    else:
                        self._tell(rank, self._parts[rank], 2 * self._rank, 1, limit, "closing a window")
                except HoldfastError:
                    continue  # it was stopped, or is gone meanwhile

    def _hear(self, rank: int, deadline: float) -> None:
        """Return when a rank has been told what it was told."""

    def _let_go(self) -> None:
        with self._side.lock:
            for part in self._parts:
                for key in (part.header_key, part.key):
                    if key is not None:
                        self._call.ucp_rkey_destroy(key)
            self._parts.clear()
        self._withdraw()

    @abstractmethod
    def _withdraw(self) -> None:
        """Stop exposing the tensor's memory. Whatever may still come must find no memory that is used."""

    def _unmap(self) -> None:
        """Let the registered memories go."""
        with self._side.lock:
            for mapping in (self._memory, self._header):
                if mapping is not None:
                    mapping.close()


def closed(rank: int) -> RegionGone:
    return RegionGone(f"rank {rank} has closed its window; make another one")
