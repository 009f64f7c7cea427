"""A window with all parts mapped by this process: puts and gets are copies, signals are counters.

Each rank alone writes its header: its state, and how often it has signalled each other rank. An atomic update holds the
target's lock (`WindowLock`); the lock's holder writes its rank there.

Headers are `Words`. The memory order of these provides the window's guarantees: a signal is written after all puts
before it, and read before all gets after it; a get checks the window again after reading it, and an owner marks its
window closed before it writes to the memory again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from holdfast.comms._native import Words, copy
from holdfast.comms.algorithms.window_lock import WindowLock
from holdfast.comms.errors import RegionGone
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

OPEN, CLOSED = 1, 2


def header_words(size: int) -> int:
    """The number of header words: the state, the signals sent to each rank, the holder of the lock."""
    return 2 + size


def holder_word(size: int) -> int:
    """The word of a header that names the holder of its rank's lock: see `WindowLock`."""
    return 1 + size


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part: its header words, its bytes, and its lock for atomic updates.

    `lend` is called before the bytes are given to a user: the owner may have to leave them at the end.
    """

    header: Words
    memory: torch.Tensor
    lock: WindowLock
    lend: Callable[[], None] = lambda: None
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.memory.data_ptr())


class MappedWindow(WindowMemory):
    """A window of ranks that share memory. `check` raises what ended the communicator; `dead` names the dead."""

    access: ClassVar[Literal["mapped", "rdma", "messages"]] = "mapped"

    def __init__(
        self,
        rank: int,
        parts: Sequence[Part],
        dead: Callable[[], Sequence[int]],
        check: Callable[[], None],
        release: Callable[[], None],
    ) -> None:
        super().__init__(len(parts))
        self.sizes = [part.memory.nbytes for part in parts]
        self._rank, self._parts = rank, list(parts)
        self._dead, self._check, self._release = dead, check, release
        self.check_waiting = check
        """As `check`; called in waits, where it may take longer."""
        self._signalling = threading.Lock()
        self._closed = False

    def write(self, rank: int, offset: int, source: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        if source.nbytes:
            copy(part.address + offset, *span(source))
            self._live(rank)

    def read(self, rank: int, offset: int, into: torch.Tensor, deadline: float) -> None:
        part = self._live(rank)
        if into.nbytes:
            copy(into.data_ptr(), part.address + offset, into.nbytes)
            self._live(rank)

    def fetch_add(self, rank: int, offset: int, dtype: torch.dtype, value: int, deadline: float) -> int:
        return self.update(rank, offset, dtype, lambda old: old + value, deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self.update(rank, offset, dtype, lambda old: desired if old == expected else old, deadline)

    def update(self, rank: int, offset: int, dtype: torch.dtype, change: Callable[[int], int], deadline: float) -> int:
        """Replace an integer by `change(it)`, atomically; returns the old value."""
        part = self._live(rank)
        kind = ctypes.c_int32 if dtype == torch.int32 else ctypes.c_int64
        with part.lock.held(deadline, lambda: self._live(rank)):
            self._live(rank)
            place = kind.from_address(part.address + offset)
            old = place.value
            place.value = change(old)
        return old

    def signal(self, rank: int, deadline: float) -> None:
        self._live(rank)
        with self._signalling:
            self._parts[self._rank].header[1 + rank] += 1

    def count_signals(self, rank: int) -> int:
        return self._parts[rank].header[1 + self._rank]

    def map(self, rank: int) -> torch.Tensor:
        part = self._live(rank)
        part.lend()
        self._live(rank)  # not closed between these: else the owner may not know that its memory is lent
        return part.memory

    def flush(self, rank: int | None, deadline: float) -> None:
        """Check that the targets are live; copies are complete when they return."""
        for target in range(len(self._parts)) if rank is None else (rank,):
            self._live(target)

    def check_live(self, rank: int) -> None:
        self._live(rank)
        self.check_waiting()

    def _live(self, rank: int) -> Part:
        if self.leaving:
            raise closed_here()
        part = self._parts[rank]
        if part.header[0] != OPEN:
            raise closed_there(rank)
        if rank != self._rank and rank in self._dead():
            raise RegionGone(f"the process of rank {rank} is gone, and its window with it; rebuild without it")
        self._check()
        return part

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._parts[self._rank].header[0] = CLOSED
            self._parts.clear()
            self._release()
