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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from holdfast.comms._native import Words
from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.onesided.mapped import OPEN, MappedWindow, Part, WindowLock, header_words, holder_word
from holdfast.comms.system.descriptors import OwnedDescriptor
from holdfast.comms.system.local_causes import check_shared_memory, unopenable_file
from holdfast.comms.system.mappings import map_file
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer, Transport, gather_bytes

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
            memory_fd, offset = _share(tensor) if tensor.nbytes else (-1, 0)
            place = _PLACE.pack(header_fd, memory_fd, offset, tensor.nbytes)
        exposed = ExposedMemory(tensor)
        places = gather_bytes(transport, place, deadline)
        with _noting(failure):
            for peer, of_peer in enumerate(places):
                if not failure:
                    where = _PLACE.unpack(of_peer)
                    parts.append(_map(backend, held, peers[peer].pid, peer, rank, size, where))
            if not failure:
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

    def release() -> None:
        held.close()
        exposed.vacate()

    return MappedWindow(rank, parts, check, release)


@contextmanager
def _noting(failure: list[Exception]) -> Iterator[None]:
    """Note an error, which all ranks have to know before one raises it."""
    try:
        yield
    except Exception as error:
        failure.append(error)


def _share(tensor: torch.Tensor) -> tuple[int, int]:
    """Move the tensor's storage into shared memory; returns its descriptor, and the tensor's byte offset in it."""
    if not tensor.untyped_storage().is_shared():
        check_shared_memory(
            tensor.untyped_storage().nbytes(),
            "a window",
            "give the container more, or take a backend whose windows need none",
        )
    descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
    return int(descriptor), int(tensor.storage_offset()) * tensor.element_size()


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
