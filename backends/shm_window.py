"""Windows between processes of one host: each rank's tensor is moved into memory that the others map.

Moving it makes late writes harmless: a rank that was stopped in the middle of a put, and goes on after the window is
closed, writes into pages that nobody uses any more. Locks for atomics are the kernel's own (open file description locks
on the header), which end with the process that holds them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from holdfast.comms._native import Words
from holdfast.comms.algorithms.mapped_window import OPEN, MappedWindow, Part, header_words
from holdfast.comms.errors import OpTimeout
from holdfast.comms.exposed import ExposedMemory
from holdfast.comms.local_causes import not_openable
from holdfast.comms.transport import Peer, Transport

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
    """Expose `tensor`, map everybody's; collective over the ranks of `transport`."""
    rank, size = transport.rank, transport.size
    held = ExitStack()
    try:
        header_fd = os.memfd_create("holdfast-window", os.MFD_CLOEXEC)
        held.callback(os.close, header_fd)
        os.fchmod(header_fd, 0o600)
        os.ftruncate(header_fd, 8 * header_words(size))
        memory_fd, offset = _share(tensor) if tensor.nbytes else (-1, 0)
        exposed = ExposedMemory(tensor)
        place = bytearray(_PLACE.pack(header_fd, memory_fd, offset, tensor.nbytes))
        places = [torch.zeros(_PLACE.size, dtype=torch.uint8, device="cpu") for _ in range(size)]
        transport.all_gather(places, torch.frombuffer(place, dtype=torch.uint8), deadline)
        parts = [
            _map(held, peers[r].pid, r, _PLACE.unpack(bytes(places[r].numpy())), 8 * header_words(size))
            for r in range(size)
        ]
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
    """Move the tensor's storage into shared memory, in place; its descriptor, and the tensor's byte offset in it."""
    descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
    return int(descriptor), int(tensor.storage_offset()) * tensor.element_size()


def _map(held: ExitStack, pid: int, rank: int, place: tuple[int, ...], header_bytes: int) -> Part:
    header_number, memory_number, offset, nbytes = place
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{header_number}", os.O_RDWR | os.O_CLOEXEC)
        held.callback(os.close, descriptor)
        header = _words(held, descriptor, header_bytes)
        address = 0
        if nbytes:
            memory = os.open(f"/proc/{pid}/fd/{memory_number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = mmap.mmap(memory, offset + nbytes)
            finally:
                os.close(memory)
            held.callback(whole.close)
            address = ctypes.addressof(ctypes.c_char.from_buffer(whole)) + offset
    except OSError as error:
        raise not_openable(rank, "window", error) from error
    return Part(header, address, nbytes, _lock_of(descriptor, rank))


def _words(held: ExitStack, descriptor: int, nbytes: int) -> Words:
    mapped = mmap.mmap(descriptor, nbytes)
    held.callback(mapped.close)
    words = Words(mapped)
    held.callback(words.release)
    return words


def _lock_of(descriptor: int, rank: int) -> Callable[[float], AbstractContextManager[None]]:
    threads = threading.Lock()

    @contextmanager
    def lock(deadline: float) -> Iterator[None]:
        began = time.monotonic()
        if not threads.acquire(timeout=max(deadline - began, 0.0)):
            raise OpTimeout("atomic", 0, time.monotonic() - began, (rank,))
        try:
            while True:
                try:
                    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 1, 0))
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise OpTimeout("atomic", 0, time.monotonic() - began, (rank,)) from None
                    os.sched_yield()
            try:
                yield
            finally:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, 0, 0, 1, 0))
        finally:
            threads.release()

    return lock
