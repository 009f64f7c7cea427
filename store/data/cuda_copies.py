"""Copies between parts and CUDA devices, on streams of their own: training is not delayed.

The bytes go straight between a device and the mapping of a part. A device copies from and to memory that CUDA was told
of (`cudaHostRegister`) several times as fast as through the driver's own buffers. So each mapping is registered once in
a process, before the first copy or ahead of it, and until it is unmapped. Where CUDA refuses, the copies go on through
the driver's buffers, and the store says why.

A device computes the checksums of what lies there, beside the copies from it or behind the copies to it. Its kernel is
compiled beside the program: until that is done, and where it cannot be done, the host computes them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.comms.system.files import mapping_at
from holdfast.store.data.digests import LEAST_BYTES, Words

Tensor = torch.Tensor
Flags = npt.NDArray[np.bool_]

GROUP_BYTES = 128 << 20
"""About so many bytes arrive on the host before their checksums are computed, beside the copies that follow.

Fewer would not pay for the start of the threads: 64 MiB arrive in 1.2 ms, and 16 threads digested them in 1.4. Only the
last ones come in groups of `CHUNK_BYTES`, so that little is left to do once all have arrived.
"""
CHUNK_BYTES = 32 << 20
"""The most bytes that one copy moves to the host."""
_READ_ONLY = 8
"""cudaHostRegisterReadOnly: the device only reads the memory, as this process does."""
_AWKWARD = (LEAST_BYTES, 1023, 1024, 1025, 1087, 8191, 8192, 8193, 8257, 20_011)
"""Bytes of pieces about the ends of the kernel's loops, which it is tried with."""
_WORD = 8
"""The kernel for checksums reads words of so many bytes, which have to be aligned."""
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

    def stream(self, device: torch.device, kernels: bool = False) -> torch.cuda.Stream:
        """The stream of this process for copies of the store, or for kernels beside them."""
        return _stream(device, kernels)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """What is queued in the context goes to a stream."""
        return torch.cuda.stream(stream)

    def digest(
        self, addresses: Words, sizes: Words, device: torch.device, targets: Words | None = None
    ) -> Callable[[], Words]:
        """Queue checksums of pieces in memory of a device, which are copied to `targets` if these are given.

        What is returned gives them once the current stream is synchronized. Raises RuntimeError.
        """
        from holdfast.store.data.digest_kernel import begin_digests

        return begin_digests(addresses, sizes, device, targets)

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

    def register(self, memory: Tensor) -> bool:
        """Register the whole mapping that a tensor of the host lies in; whether CUDA knows it now."""
        address = memory.untyped_storage().data_ptr()
        mapping = mapping_at(address)
        if mapping is None:
            return False  # other memory: nothing would tell when it goes
        with self._lock:
            if mapping.registered is not None:
                return mapping.registered
            why = self._cuda.register(address, mapping.nbytes, mapping.writable)
            if why and not self.refused:
                _log.warning(
                    "copies of weights from and to CUDA devices are slow here: cudaHostRegister of %d bytes says %r; "
                    "raise the limit of locked memory (ulimit -l)",
                    mapping.nbytes,
                    why,
                )
            self.refused = self.refused or why
            mapping.registered = not why
            if not why:
                mapping.before_unmap = functools.partial(self._cuda.unregister, address)
        return not why


class DeviceDigests:
    """Checksums by the devices of this process. Thread-safe."""

    def __init__(self, cuda: Cuda) -> None:
        self.refused = ""
        """Why the devices cannot compute them, if they cannot."""
        self._cuda = cuda
        self._lock = threading.Lock()
        self._ready: dict[torch.device, bool] = {}

    def ready(self, device: torch.device) -> bool:
        """Whether a device can compute them now. A thread compiles the kernel after the first call."""
        if (found := self._ready.get(device)) is None:
            with self._lock:
                if device not in self._ready:
                    self._ready[device] = False
                    name = "holdfast-store-kernels"
                    threading.Thread(target=self._compile, args=(device,), name=name, daemon=True).start()
        return bool(found) and not self.refused

    def compile(self, device: torch.device) -> None:
        """Compile the kernel now: that takes seconds unless an earlier process did it. Raises what hinders it.

        It has to copy pieces of awkward lengths, and to find the checksums that xxhash finds; else RuntimeError.
        """
        sizes, starts = np.array(_AWKWARD, np.uint64), _WORD * np.arange(len(_AWKWARD), dtype=np.uint64)
        size = max(_AWKWARD) + _WORD * len(_AWKWARD)
        data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, np.uint8))
        pieces = [data[start : start + length] for start, length in zip(starts.tolist(), _AWKWARD, strict=True)]
        there = data.to(device)
        into = torch.zeros(len(pieces), size // _WORD * _WORD, dtype=torch.uint8, device=device)
        targets = np.array([row.data_ptr() for row in into], np.uint64)
        stream = self._cuda.stream(device, kernels=True)
        stream.wait_stream(self._cuda.current_stream(device))
        for copied in (None, targets):
            with self._cuda.on(stream):
                digested = self._cuda.digest(starts + np.uint64(there.data_ptr()), sizes, device, copied)
            stream.synchronize()
            if digested().tolist() != [xxhash.xxh3_64_intdigest(piece.numpy().data) for piece in pieces]:
                raise RuntimeError("it finds other checksums than xxhash")
        if not all(torch.equal(row[: len(piece)], piece) for row, piece in zip(into.cpu(), pieces, strict=True)):
            raise RuntimeError("it copies other bytes")
        self._ready[device] = True

    def _compile(self, device: torch.device) -> None:
        try:
            self.compile(device)
        except Exception as error:  # of Triton, of the compilers that it calls, or of its import
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Leave checksums to the host from now on."""
        with self._lock:
            first, self.refused = not self.refused, self.refused or f"{type(error).__name__}: {error}"
        if first:
            _log.warning(
                "the host computes the checksums of weights on CUDA devices, which slows copies down: the kernel for "
                "the device cannot be used: %s; install triton and a C compiler if they are missing",
                self.refused,
            )

    def queue(
        self,
        stream: torch.cuda.Stream,
        device: torch.device,
        addresses: Words,
        sizes: Words,
        targets: Words | None = None,
    ) -> Callable[[], Words] | None:
        """Queue checksums of pieces on a stream, and copies to `targets`; None if the host has to do it.

        What is returned gives them once the stream is synchronized.
        """
        if not self.ready(device):
            return None
        try:
            with self._cuda.on(stream):
                return self._cuda.digest(addresses, sizes, device, targets)
        except Exception as error:  # of torch and Triton
            self.refuse(error)
            return None


cuda = Cuda()
registrations = Registrations(cuda)
digests = DeviceDigests(cuda)


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a device that this module copies from and to."""
    return cuda.has(tensor)


def can_digest(addresses: Words, sizes: Words) -> Flags:
    """Which pieces the kernel takes: not short ones, nor those at odd addresses."""
    found: Flags = (addresses % _WORD == 0) & (sizes >= LEAST_BYTES)
    return found


def register_ahead(memory: Tensor) -> None:
    """Register the mapping that a tensor of the host lies in, if this process uses CUDA."""
    if cuda.in_use():
        registrations.register(memory)


def digest_beside(device: torch.device, addresses: Words, sizes: Words) -> Callable[[], Words] | None:
    """Begin to compute checksums of what the current stream has made, beside copies of it.

    What is returned waits for them. None if the host has to do it.
    """
    stream = cuda.stream(device, kernels=True)
    stream.wait_stream(cuda.current_stream(device))
    if (digested := digests.queue(stream, device, addresses, sizes)) is None:
        return None

    def result() -> Words:
        stream.synchronize()
        return digested()

    return result


class HostCopy(NamedTuple):
    """A copy from a device to a part. Both tensors have one shape; `end` is the byte of the part behind it."""

    source: Tensor
    target: Tensor
    end: int


def to_host(copies: Sequence[HostCopy], arrived: Callable[[int], None]) -> None:
    """Copy tensors of devices into a part, in order; report to `arrived` the end of what is there.

    A copy begins when the work of the current stream that is queued so far is done, and does not delay what is queued
    later. Only the calling thread waits.
    """
    streams = _streams(copy.source.device for copy in copies)
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
    """Copies of bytes to devices that were begun; `wait` returns when they are there.

    The current streams of the devices wait for the copies, so what is queued later sees the new elements.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device | None = None) -> None:
        """Begin to copy each first tensor into the second, of its shape; `digest` may follow on `device`."""
        self._streams = _streams([*(target.device for _, target in pairs), *([device] if device else [])])
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

    def digest(
        self, device: torch.device, addresses: Words, sizes: Words, targets: Words | None = None
    ) -> Callable[[], Words] | None:
        """Queue checksums behind the copies, as `DeviceDigests.queue` does: call what is returned after `wait`."""
        return digests.queue(self._streams[device], device, addresses, sizes, targets)

    def wait(self) -> None:
        for device, stream in self._streams.items():
            cuda.current_stream(device).wait_stream(stream)
            stream.synchronize()


def _streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Stream]:
    """The streams for copies of devices, which wait for the current ones."""
    found = {device: cuda.stream(device) for device in dict.fromkeys(devices)}
    for device, stream in found.items():
        stream.wait_stream(cuda.current_stream(device))
    return found


@functools.cache
def _stream(device: torch.device, kernels: bool) -> torch.cuda.Stream:
    """Kernels of the store are short, and go first: what waits for them has not ended."""
    return torch.cuda.Stream(device, priority=-1 if kernels else 0)  # type: ignore[no-untyped-call]
