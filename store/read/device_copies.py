"""Copies of parts on their publisher's GPU, which readers of the same host and GPU copy within the device.

The memory of a copy is allocated by `cudaMalloc` itself: torch's allocator gives pieces of larger blocks, which CUDA
IPC hands out whole, and with expandable segments memory that IPC does not know. What travels are typed fields; nothing
is unpickled. What cannot be read there is left to the part's region on the host, and counted.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.comms.errors import BackendUnavailable, HoldfastError, RegionGone, Unsupported
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone
from holdfast.ft.state.boxes import Box
from holdfast.store.catalog.records import DeviceAddress, Replica
from holdfast.store.data import cuda_copies
from holdfast.store.data.cuda_copies import CopiesToDevices, on_device
from holdfast.store.data.digests import LEAST_BYTES, NBYTES, SOURCE, Indexes, Words, flat_bytes, is_dense
from holdfast.store.data.manifest import LARGE_BYTES
from holdfast.store.data.packing import PackedPart
from holdfast.store.read.filling import PartTargets
from holdfast.store.read.part_source import PartSource

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HINT = "leave out device_copies=True"


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class _DeviceSpan:
    """Bytes of a device, as torch takes them over without a copy; `release` is called once no tensor has them."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], object]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip
        weakref.finalize(self, _in_process, os.getpid(), release).atexit = False


def _in_process(pid: int, release: Callable[[], object]) -> None:
    if os.getpid() == pid:  # a forked child has no devices
        release()


class CudaIpc:
    """The calls of CUDA for memory that processes share. Tests have others."""

    def check(self) -> None:
        """Raise `Unsupported` unless memory of devices can be shared here."""
        if torch.version.hip is not None or not torch.cuda.is_available():
            raise Unsupported("copies of weights on a device: torch sees no CUDA device", _HINT)
        _runtime()

    def gpu(self, device: torch.device) -> str:
        """The UUID of a device."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory of a device as a uint8 tensor. Raises `BackendUnavailable` if there is not enough."""
        runtime, address = _runtime(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)), f"allocate {nbytes} bytes")
            assert address.value is not None
            span = _DeviceSpan(address.value, nbytes, functools.partial(_free, address.value, device))
            return torch.as_tensor(span, device=device)

    def address(self, memory: torch.Tensor) -> DeviceAddress:
        """The address of memory of `allocate`."""
        handle = _Handle()
        with torch.cuda.device(memory.device):
            pointer = ctypes.c_void_p(memory.data_ptr())
            _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "share memory by CUDA IPC")
        return DeviceAddress(self.gpu(memory.device), bytes(handle), memory.nbytes)

    def open(self, address: DeviceAddress, device: torch.device) -> torch.Tensor:
        """Memory of another process, which lasts as long as the tensor. Raises `RegionGone`, `BackendUnavailable`."""
        if len(address.handle) != _HANDLE_BYTES:
            raise RegionGone("not a handle of CUDA IPC")
        runtime, pointer = _runtime(), ctypes.c_void_p()
        with torch.cuda.device(device):
            handle = _Handle.from_buffer_copy(address.handle)
            error = runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
            _check(error, "open memory by CUDA IPC")
            assert pointer.value is not None
            span = _DeviceSpan(pointer.value, address.nbytes, functools.partial(_close, pointer.value, device))
            return torch.as_tensor(span, device=device)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """CUDA's runtime, as torch has loaded it. Raises `Unsupported`."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if not paths:
        raise Unsupported("copies of weights on a device: torch was built without a shared CUDA runtime", _HINT)
    runtime = ctypes.CDLL(paths.pop())
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _check(error: int, what: str) -> None:
    if error:
        _runtime().cudaGetLastError()  # take it back: the next launch of a kernel would report it
        why = _runtime().cudaGetErrorString(error).decode()
        raise BackendUnavailable("CUDA", f"it cannot {what}: {why}", _HINT)


def _free(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _runtime().cudaFree(ctypes.c_void_p(address))


def _close(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(address))


ipc = CudaIpc()
_own: weakref.WeakValueDictionary[bytes, torch.Tensor] = weakref.WeakValueDictionary()
"""The memory that this process shares, by handle: CUDA opens no handle in the process that made it."""


def share(memory: torch.Tensor) -> DeviceAddress:
    """The address of memory of `ipc.allocate`, for this process too."""
    address = ipc.address(memory)
    _own[address.handle] = memory
    return address


def open_memory(address: DeviceAddress, device: torch.device) -> torch.Tensor:
    """The memory at an address, of this or another process of the host. Raises `RegionGone`, `BackendUnavailable`."""
    own = _own.get(address.handle)
    return ipc.open(address, device) if own is None else own


_log = logging.getLogger("holdfast.store")

Sources = Mapping[tuple[str, Box | None], torch.Tensor]
"""The tensors of a part, by name and box."""


class DeviceCopy:
    """The memory of a copy, laid out as the part, and its address."""

    def __init__(self, memory: torch.Tensor, address: DeviceAddress) -> None:
        self.memory, self.address = memory, address


class DeviceCopies:
    """The copies that one store of this process makes. Thread-safe.

    Memory of a copy that goes is used for the next one; no reader takes that for the part, because the part's region
    is closed before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[DeviceCopy] = []
        self._closed = False

    def copy(self, packed: PackedPart, sources: Sources) -> DeviceCopy | None:
        """Copy a packed part to the device of most of its tensors; None if they are on the host.

        None, and a warning, if the device has no room.
        """
        entries = packed.manifest.layout.entries
        tensors = [sources[entry.name, entry.box] for entry in entries]
        sizes: dict[torch.device, int] = {}
        for tensor in filter(on_device, tensors):
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
        if not sizes:
            return None
        device = max(sizes, key=lambda each: sizes[each])
        try:
            found = self._take(packed.manifest.layout.data_bytes, device)
            CopiesToDevices(_pairs(packed, tensors, found.memory)).wait()
        except (HoldfastError, RuntimeError) as error:
            _log.warning("a part of %d bytes has no copy on %s: %s", packed.nbytes, device, error)
            return None
        return found

    def give_back(self, copy: DeviceCopy) -> None:
        """Use the memory of a copy for the next one. The caller has closed the region of its part."""
        with self._lock:
            if not self._closed:
                self._spare = [copy, *self._spare][:1]

    def close(self) -> None:
        """Let all memory go. Idempotent."""
        with self._lock:
            self._closed = True
            self._spare.clear()

    def _take(self, nbytes: int, device: torch.device) -> DeviceCopy:
        with self._lock:
            fits = [each for each in self._spare if each.memory.device == device and each.memory.nbytes == nbytes]
            self._spare.clear()
        if fits:
            return fits[0]
        memory = ipc.allocate(nbytes, device)
        return DeviceCopy(memory, share(memory))


def _pairs(
    packed: PackedPart, tensors: Sequence[torch.Tensor], into: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies that fill a device copy: from the device what lies there in order, the rest from the part."""
    layout = packed.manifest.layout
    small = next((each.offset for each in layout.entries if each.nbytes >= LARGE_BYTES), layout.data_bytes)
    pairs = [(packed.memory[:small], into[:small])] if small else []
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        if entry.nbytes >= LARGE_BYTES:
            span = slice(entry.offset, entry.offset + entry.nbytes)
            there = tensor.device == into.device and is_dense(tensor)
            pairs.append((flat_bytes(tensor) if there else packed.memory[span], into[span]))
    return pairs


MOST_OPEN = 16
"""The number of copies that a reader keeps open: each publisher has a few, which it uses again and again."""

TellUnused = Callable[[int, int, str, str], None]
"""A callback for a copy that was not read, or not whole: version, part, holder's id, why."""


@dataclass(slots=True)
class DeviceReadCounts:
    """The number of parts read from copies on the device, and of copies that could not be used."""

    read: int = 0
    unused: int = 0


class DeviceReads:
    """The copies on devices that a store of this process has open. Thread-safe."""

    def __init__(self, tell: TellUnused) -> None:
        self.counts = DeviceReadCounts()
        self._tell = tell
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[Peer, torch.Tensor]] = {}

    def fill(self, source: PartSource, into: PartTargets, expected: Words, todo: Indexes) -> Indexes:
        """Do those of the jobs `todo` that a copy on the targets' device allows; return the others."""
        self._let_dead_go()
        device = into.device
        found = None if device is None else self._copy_of(source, device)
        if device is None or found is None:
            return todo
        peer, replica, address = found
        chosen = todo[into.only_away[todo] & (into.plan.jobs[todo, NBYTES] >= LEAST_BYTES)]
        if not len(chosen):
            return todo
        try:
            memory = self._opened(peer, address, device)
            right = chosen[_copy(memory, into, chosen, device) == expected[chosen]]
            source.check_open(replica)
        except (HoldfastError, RuntimeError) as error:  # torch's and Triton's errors are RuntimeErrors
            self._unused(source, replica, str(error))
            return todo
        if len(right) < len(chosen):
            self._unused(source, replica, f"{len(chosen) - len(right)} of {len(chosen)} pieces have wrong bytes")
        else:
            self.counts.read += 1
        return np.setdiff1d(todo, right)

    def close(self) -> None:
        """Let all copies go. Idempotent."""
        with self._lock:
            self._open.clear()

    def _copy_of(self, source: PartSource, device: torch.device) -> tuple[Peer, Replica, DeviceAddress] | None:
        gpu = ipc.gpu(device)
        for peer, replica in source.of_this_host():
            address = replica.device
            if address is not None and address.gpu == gpu:
                if address.nbytes >= source.shard.manifest_at - 63:  # which is rounded up
                    return peer, replica, address
                self._unused(source, replica, "it is smaller than the part")
        return None

    def _opened(self, peer: Peer, address: DeviceAddress, device: torch.device) -> torch.Tensor:
        with self._lock:
            if (known := self._open.pop(address.handle, None)) is None:
                if is_gone(peer):
                    raise RegionGone(f"its publisher, process {peer.pid}, is gone")
                known = peer, open_memory(address, device)
            self._open[address.handle] = known
            for oldest in list(self._open)[:-MOST_OPEN]:
                del self._open[oldest]
            return known[1]

    def _let_dead_go(self) -> None:
        """Close the copies of processes that are gone: the GPU has their memory until then."""
        with self._lock:
            peers = {peer for peer, _ in self._open.values()}
            dead = {peer for peer in peers if is_gone(peer)}
            self._open = {handle: each for handle, each in self._open.items() if each[0] not in dead}

    def _unused(self, source: PartSource, replica: Replica, why: str) -> None:
        self.counts.unused += 1
        _log.warning("%s is read from the host, not from the copy on the device: %s", source.what, why)
        self._tell(source.version, source.shard.part, replica.holder, why)


def _copy(memory: torch.Tensor, into: PartTargets, todo: Indexes, device: torch.device) -> Words:
    """Copy what jobs take, and return the checksums of their pieces: of whole ones, one kernel does both."""
    jobs, (whole, places) = into.plan.jobs[todo], into.whole_there(todo)
    sources, sums, begun = jobs[:, SOURCE] + np.uint64(memory.data_ptr()), np.zeros(len(todo), np.uint64), []
    under_way = into.begin_copies(memory, 0, todo[~whole])
    try:
        for mine, targets in ((whole, places[whole]), (~whole, None)):
            if mine.any():
                if (digested := under_way.digest(device, sources[mine], jobs[mine, NBYTES], targets)) is None:
                    raise BackendUnavailable("CUDA", cuda_copies.digests.refused, "the log says more")
                begun.append((mine, digested))
    finally:
        under_way.wait()
    for mine, digested in begun:
        sums[mine] = digested()
    return sums
