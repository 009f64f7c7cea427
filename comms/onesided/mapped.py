"""A window with all parts mapped by this process: puts and gets are copies, signals are counters.

Each rank alone writes its header: its state, and how often it has signalled each other rank. An atomic update holds the
target's lock (`WindowLock`); the lock's holder writes its rank there.

Headers are `Words`. The memory order of these provides the window's guarantees: a signal is written after all puts
before it, and read before all gets after it; a get checks the window again after reading it, and an owner marks its
window closed before it writes to the memory again.

Between processes of one host (`make_window`), each rank's tensor is moved into memory that the others map. The move
makes late writes harmless: a rank that was stopped in the middle of a put, and continues after the last window over the
storage is closed, writes into pages that no process uses any more (`SharedPages`). Locks for atomics are the kernel's
open-file-description locks on the header, which end with the process that holds them.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from holdfast.comms._native import Words, copy
from holdfast.comms.errors import BackendUnavailable, OpTimeout
from holdfast.comms.onesided.shared_pages import SharedPages
from holdfast.comms.system.files import OwnedDescriptor, map_file
from holdfast.comms.system.local_causes import unopenable_file
from holdfast.comms.system.waiting import Wait, change
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.comms.tensors.packing import span
from holdfast.comms.transport.base import Peer, Transport, WindowMemory, closed_here, closed_there, gather_bytes

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

    `lend` is called before the bytes are given to a user: the owner may have to leave them at the end. `own` is the
    tensor of this rank's own part, if `memory` is a second mapping of it: a call finds an overlap by addresses.
    """

    header: Words
    memory: torch.Tensor
    lock: WindowLock
    lend: Callable[[], None] = lambda: None
    own: torch.Tensor | None = None
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", (self.memory if self.own is None else self.own).data_ptr())


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


_PLACE = struct.Struct("=qqqq")
"""Descriptors of the header and of the memory, the offset in the latter and the size, in bytes."""
_FLOCK = "hhqqi4x"


def make_window(
    backend: str,
    transport: Transport,
    peers: Sequence[Peer],
    tensor: torch.Tensor,
    deadline: float,
    check: Callable[[int], object],
) -> MappedWindow:
    """Expose `tensor`, and map the parts of all ranks; collective over the ranks of `transport`, all on this host.

    Raises `BackendUnavailable`, or what this rank lacks, on all ranks if one of them cannot.
    """
    window = try_window(backend, transport, peers, tensor, deadline, check)
    if not isinstance(window, MappedWindow):
        raise window
    return window


def try_window(
    backend: str,
    transport: Transport,
    peers: Sequence[Peer],
    tensor: torch.Tensor,
    deadline: float,
    check: Callable[[int], object],
) -> MappedWindow | Exception:
    """As `make_window`; returns the error if a rank cannot share its memory or map that of the others."""
    rank, size = transport.rank, transport.size
    held, failure, parts = ExitStack(), list[Exception](), list[Part]()
    place = _PLACE.pack(-1, -1, 0, 0)
    try:
        with _noting(failure):
            header_fd = OwnedDescriptor(os.memfd_create("holdfast-window", os.MFD_CLOEXEC))
            held.callback(header_fd.close)
            os.fchmod(header_fd, 0o600)
            os.ftruncate(header_fd, 8 * header_words(size))
            if tensor.nbytes:
                pages = SharedPages(tensor)
                held.callback(pages.release)  # the last of all: no peer of an open window uses them then
                place = _PLACE.pack(header_fd, pages.descriptor, pages.offset, tensor.nbytes)
            else:
                place = _PLACE.pack(header_fd, -1, 0, 0)
        exposed = ExposedMemory(tensor)
        places = gather_bytes(transport, place, deadline)
        with _noting(failure):
            for peer, of_peer in enumerate(places):
                if not failure:
                    where = _PLACE.unpack(of_peer)
                    parts.append(_map(backend, held, peers[peer].pid, peer, rank, size, where))
            if not failure:
                parts[rank] = replace(parts[rank], own=exposed.held)
                parts[rank].header[0] = OPEN
        failed = [flag != b"\0" for flag in gather_bytes(transport, bytes([len(failure)]), deadline)]
    except BaseException:
        held.close()
        raise
    for peer, flag in enumerate(failed):
        if flag:
            held.close()
            return (
                failure[0]
                if failure
                else BackendUnavailable(backend, f"rank {peer} cannot share or map a window", "its error says why")
            )

    return MappedWindow(rank, parts, check, held.close)


@contextmanager
def _noting(failure: list[Exception]) -> Iterator[None]:
    """Note an error, which all ranks have to know before one raises it."""
    try:
        yield
    except Exception as error:
        failure.append(error)


def _map(backend: str, held: ExitStack, pid: int, rank: int, me: int, size: int, place: tuple[int, ...]) -> Part:
    header_number, memory_number, offset, nbytes = place
    try:
        descriptor = OwnedDescriptor(os.open(f"/proc/{pid}/fd/{header_number}", os.O_RDWR | os.O_CLOEXEC))
        held.callback(descriptor.close)
        header = _words(held, descriptor, 8 * header_words(size))
        bytes_ = torch.empty(0, dtype=torch.uint8, device="cpu")
        if nbytes:
            memory = os.open(f"/proc/{pid}/fd/{memory_number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = map_file(memory, offset + nbytes)
            finally:
                os.close(memory)
            bytes_ = torch.frombuffer(whole.obj, dtype=torch.uint8, count=nbytes, offset=offset)
    except OSError as error:
        raise unopenable_file(backend, rank, "window", error) from error
    lock = _FileLock(descriptor)
    return Part(header, bytes_, WindowLock(rank, me, header, holder_word(size), lock.try_acquire, lock.release))


def _words(held: ExitStack, descriptor: int, nbytes: int) -> Words:
    words = Words(map_file(descriptor, nbytes))
    held.callback(words.release)
    return words


class _FileLock:
    """A kernel lock on a header, which ends with its holder's process, and a lock among threads of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._threads = descriptor, threading.Lock()

    def try_acquire(self) -> bool:
        """Try to take the lock; whether that succeeded."""
        if not self._threads.acquire(blocking=False):
            return False
        try:
            self._lock(fcntl.F_WRLCK)
        except BlockingIOError:
            self._threads.release()
            return False
        except BaseException:
            self._threads.release()
            raise
        return True

    def release(self) -> None:
        try:
            self._lock(fcntl.F_UNLCK)
        finally:
            self._threads.release()

    def _lock(self, kind: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, 0, 0, 1, 0))
