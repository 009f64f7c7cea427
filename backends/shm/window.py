"""Windows between processes of one host: each rank's tensor is moved into memory that the others map.

The move makes late writes harmless: a rank that was stopped in the middle of a put, and continues after the window is
closed, writes into pages that no process uses any more. Locks for atomics are the kernel's open-file-description locks
on the header, which end with the process that holds them.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from holdfast.comms._native import Words
from holdfast.comms.algorithms.shared_memory.mapped_window import OPEN, MappedWindow, Part, header_words, holder_word
from holdfast.comms.algorithms.window_lock import WindowLock
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.system.local_causes import unopenable_file
from holdfast.comms.system.mappings import map_file
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer, Transport

_PLACE = struct.Struct("=qqqq")
"""Descriptors of the header and of the memory, the offset in the latter and the size, in bytes."""
_FLOCK = "hhqqi4x"


def make_window(
    transport: Transport,
    peers: Sequence[Peer],
    tensor: torch.Tensor,
    deadline: float,
    dead: Callable[[], Sequence[int]],
    check: Callable[[], None],
) -> MappedWindow:
    """Expose `tensor`, and map the parts of all ranks; collective over the ranks of `transport`."""
    rank, size = transport.rank, transport.size
    held = ExitStack()
    try:
        header_fd = OwnedDescriptor(os.memfd_create("holdfast-window", os.MFD_CLOEXEC))
        held.callback(header_fd.close)
        os.fchmod(header_fd, 0o600)
        os.ftruncate(header_fd, 8 * header_words(size))
        memory_fd, offset = _share(tensor) if tensor.nbytes else (-1, 0)
        exposed = ExposedMemory(tensor)
        place = bytearray(_PLACE.pack(header_fd, memory_fd, offset, tensor.nbytes))
        places = [torch.zeros(_PLACE.size, dtype=torch.uint8, device="cpu") for _ in range(size)]
        transport.all_gather(places, torch.frombuffer(place, dtype=torch.uint8), deadline)
        parts = [_map(held, peers[r].pid, r, rank, size, _PLACE.unpack(bytes(places[r].numpy()))) for r in range(size)]
        parts[rank].header[0] = OPEN
        transport.barrier(deadline)
    except BaseException:
        held.close()
        raise

    def release() -> None:
        held.close()
        exposed.vacate()

    return MappedWindow(rank, parts, dead, check, release)


def _share(tensor: torch.Tensor) -> tuple[int, int]:
    """Move the tensor's storage into shared memory; returns its descriptor, and the tensor's byte offset in it."""
    descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
    return int(descriptor), int(tensor.storage_offset()) * tensor.element_size()


def _map(held: ExitStack, pid: int, rank: int, me: int, size: int, place: tuple[int, ...]) -> Part:
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
        raise unopenable_file("shm", rank, "window", error) from error
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
