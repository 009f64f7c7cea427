"""A window with all parts mapped by this process: puts and gets are copies, signals are counters.

Each rank alone writes its header: its state, and how often it has signalled each other rank. An atomic update holds the
target's lock (`WindowLock`); the lock's holder writes its rank there.

Headers are `Words`. The memory order of these provides the window's guarantees: a signal is written after all puts
before it, and read before all gets after it; a get checks the window again after reading it, and an owner marks its
window closed before it writes to the memory again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from holdfast.comms._native import Words, copy
from holdfast.comms.errors import OpTimeout
from holdfast.comms.system.cpu_wait import Wait, change
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.window_memory import WindowMemory, closed_here, closed_there

OPEN, CLOSED = 1, 2


def header_words(size: int) -> int:
    """The number of header words: the state, the signals sent to each rank, the holder of the lock."""
    return 2 + size


def holder_word(size: int) -> int:
    """The word of a header that names the holder of its rank's lock: see `WindowLock`."""
    return 1 + size


class WindowLock:
    """The lock for atomics on `target`'s part, for rank `me`. A wait for it ends, and names its holder.

    A stopped holder keeps the lock for as long as it is stopped. So a waiter yields, checks whether it still has to
    wait, and at the deadline names the holder, which has written its rank into the header.

    The backend supplies `try_acquire()`, which returns whether it took the lock, and `release()`. The lock must end
    with its holder's process. Word `holder` of `header` is the rank that holds it, plus one.
    """

    def __init__(
        self,
        target: int,
        me: int,
        header: Words,
        holder: int,
        try_acquire: Callable[[], bool],
        release: Callable[[], None],
    ) -> None:
        self._target, self._me = target, me
        self._header, self._holder = header, holder
        self._try_acquire, self._release = try_acquire, release

    @contextmanager
    def held(self, deadline: float, look: Callable[[], object]) -> Iterator[None]:
        """Hold the lock. Raises `OpTimeout`, and what `look()` raises, which is called while waiting."""
        Wait().until(
            self._try_acquire, look, deadline, lambda seconds: OpTimeout("atomic", 0, seconds, (self._held_by(),))
        )
        self._header[self._holder] = self._me + 1
        try:
            yield
        finally:
            self._header[self._holder] = 0
            self._release()

    def _held_by(self) -> int:
        """The rank that holds the lock, if it has written its rank already; else the rank that owns the lock."""
        return (self._header[self._holder] or self._target + 1) - 1


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
    """A window of ranks that share memory. `check(rank)` raises `gone(rank)`, or what ended the communicator."""

    access: ClassVar[Literal["mapped", "messages"]] = "mapped"

    def __init__(
        self,
        rank: int,
        parts: Sequence[Part],
        check: Callable[[int], object],
        release: Callable[[], None],
    ) -> None:
        super().__init__(len(parts))
        self.sizes = [part.memory.nbytes for part in parts]
        self._rank, self._parts = rank, list(parts)
        self._check, self._release = check, release
        self.check_waiting: Callable[[], object] = lambda: None
        """Called in waits beside `check`, where it may take longer."""
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
        return self._change(rank, offset, dtype, True, value, 0, deadline)

    def compare_swap(
        self, rank: int, offset: int, dtype: torch.dtype, expected: int, desired: int, deadline: float
    ) -> int:
        return self._change(rank, offset, dtype, False, expected, desired, deadline)

    def _change(
        self, rank: int, offset: int, dtype: torch.dtype, add: bool, first: int, second: int, deadline: float
    ) -> int:
        part = self._live(rank)
        with part.lock.held(deadline, lambda: self._live(rank)):
            self._live(rank)
            return change(part.address + offset, dtype.itemsize, add, first, second)

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
        self._check(rank)
        return part

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._parts[self._rank].header[0] = CLOSED
            self._parts.clear()
            self._release()
