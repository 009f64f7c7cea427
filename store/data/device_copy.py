"""Copies between parts and CUDA devices, on streams of their own: training is not delayed.

The bytes go straight between a device and the mapping of a part. A device copies from and to memory that CUDA was told
of (`cudaHostRegister`) several times as fast as through the driver's own buffers. So each mapping is registered once in
a process, before the first copy or ahead of it, and until it is unmapped. Where CUDA refuses, the copies go on through
the driver's buffers, and the store says why.

Checksums are computed on the host, beside the copies: all cores together read memory faster than a device copies it,
and the first copy does not wait for a compiler of kernels.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple

import torch

from holdfast.comms.system.mappings import mapping_at

Tensor = torch.Tensor

GROUP_BYTES = 128 << 20
"""About so many bytes arrive on the host before their checksums are computed, beside the copies that follow.

Fewer would not pay for the start of the threads: 64 MiB arrive in 1.2 ms, and 16 threads digested them in 1.4. Only the
last ones come in groups of `CHUNK_BYTES`, so that little is left to do once all have arrived.
"""
CHUNK_BYTES = 32 << 20
"""The most bytes that one copy moves to the host."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly: the device only reads the memory, as this process does."""
_log = logging.getLogger("holdfast.store")


class Cuda:
    """The calls of CUDA that the copies make. Tests have others."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device."""
        return tensor.is_cuda

    def in_use(self) -> bool:
        """Whether this process uses CUDA."""
        return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]

    def register(self, address: int, nbytes: int, writable: bool) -> str:
        """Register memory; returns "", or what CUDA has against it."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(address, nbytes, 0 if writable else _READ_ONLY)
        if int(error) == 0:
            return ""
        self._clear_error()
        return str(cudart.cudaGetErrorString(error))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of this process for copies of the store."""
        return _stream(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """What is queued in the context goes to a stream."""
        return torch.cuda.stream(stream)

    def _clear_error(self) -> None:
        """Take the error back, which the next launch of a kernel in this thread would report as its own."""
        try:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        except RuntimeError:
            _log.debug("CUDA reported the failed registration again")


class Registrations:
    """The mappings of this process that CUDA was told of. Thread-safe."""

    def __init__(self, cuda: Cuda) -> None:
        self.refused = ""
        """Why CUDA did not register a mapping, if it did not."""
        self._cuda = cuda
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], bool] = {}
        """By process and address: a forked child has the mappings of its parent, but not its devices."""

    def register(self, memory: Tensor) -> bool:
        """Register the whole mapping that a tensor of the host lies in; whether CUDA knows it now."""
        storage = memory.untyped_storage()
        address = storage.data_ptr()
        key = os.getpid(), address
        if (known := self._known.get(key)) is not None:
            return known
        mapping = mapping_at(address)
        if mapping is None:
            return False  # other memory: nothing would tell when it goes
        with self._lock:
            if (known := self._known.get(key)) is not None:
                return known
            why = self._cuda.register(address, mapping.nbytes, mapping.writable)
            if why and not self.refused:
                _log.warning(
                    "copies of weights from and to CUDA devices are slow here: cudaHostRegister of %d bytes says %r; "
                    "raise the limit of locked memory (ulimit -l)",
                    mapping.nbytes,
                    why,
                )
            self.refused = self.refused or why
            self._known[key] = not why
            mapping.before_unmap = functools.partial(self._forget, key)
        return not why

    def _forget(self, key: tuple[int, int]) -> None:
        if self._known.pop(key, False):  # without the lock: the collector may call this in any thread
            self._cuda.unregister(key[1])


cuda = Cuda()
registrations = Registrations(cuda)


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a device that this module copies from and to."""
    return cuda.has(tensor)


def register_ahead(memory: Tensor) -> None:
    """Register the mapping that a tensor of the host lies in, if this process uses CUDA."""
    if cuda.in_use():
        registrations.register(memory)


class HostCopy(NamedTuple):
    """What is copied from a device to a part: both tensors have one shape; `end` is the byte of the part behind it."""

    source: Tensor
    target: Tensor
    end: int


def to_host(copies: Sequence[HostCopy], arrived: Callable[[int], None]) -> None:
    """Copy tensors of devices into a part, in order; calls `arrived`, again and again, with the end of what is there.

    A copy begins when the work of the current stream that is queued so far is done, and does not delay what is queued
    later. Only the calling thread waits.
    """
    streams = _streams(copy.source for copy in copies)
    arrivals: list[tuple[int, torch.cuda.Event]] = []
    try:
        with torch.inference_mode():
            for device, group in groupby(copies, lambda copy: copy.source.device):
                with cuda.on(streams[device]):
                    arrivals += _queue(list(group), streams[device])
        for end, event in arrivals:
            event.synchronize()
            arrived(end)
    finally:
        for stream in streams.values():
            stream.synchronize()


def _queue(copies: Sequence[HostCopy], stream: torch.cuda.Stream) -> Iterator[tuple[int, torch.cuda.Event]]:
    """Queue copies from one device; yields events, with the end of what is there once they have happened."""
    under_way, left = 0, sum(copy.target.nbytes for copy in copies)
    for copy in copies:
        copy.target.copy_(copy.source.resolve_conj().resolve_neg(), non_blocking=True)
        under_way += copy.target.nbytes
        left -= copy.target.nbytes
        if copy is copies[-1] or under_way >= (GROUP_BYTES if left >= GROUP_BYTES else CHUNK_BYTES):
            yield copy.end, stream.record_event()
            under_way = 0


class CopiesToDevices:
    """Copies of bytes of the host to devices that were begun; `wait` returns when they are there.

    The current streams of the devices wait for the copies, so what is queued later sees the new elements.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each first tensor, on the host, into the second, of its shape."""
        self._streams = _streams(target for _, target in pairs)
        try:
            with torch.inference_mode():
                for device, stream in self._streams.items():
                    with cuda.on(stream):
                        for source, target in pairs:
                            if target.device == device:
                                target.copy_(source, non_blocking=True)
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        for device, stream in self._streams.items():
            cuda.current_stream(device).wait_stream(stream)
            stream.synchronize()


def _streams(tensors: Iterable[Tensor]) -> dict[torch.device, torch.cuda.Stream]:
    """The streams for copies of the tensors' devices, which wait for the current ones."""
    found = {device: cuda.stream(device) for device in dict.fromkeys(tensor.device for tensor in tensors)}
    for device, stream in found.items():
        stream.wait_stream(cuda.current_stream(device))
    return found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
