"""Memory of a CUDA device that other processes of the host reach by CUDA IPC.

It is allocated by `cudaMalloc` itself: torch's allocator gives pieces of larger blocks, which IPC hands out whole, and
with expandable segments memory that IPC does not know. What travels are typed fields; nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.comms.errors import BackendUnavailable, RegionGone, Unsupported
from holdfast.store.catalog.records import DeviceAddress

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HINT = "leave out device_copies=True"


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class _Span:
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
            span = _Span(address.value, nbytes, functools.partial(_free, address.value, device))
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
            span = _Span(pointer.value, address.nbytes, functools.partial(_close, pointer.value, device))
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
