"""The memory plane inside one process: for ranks that are threads, tests and notebooks.

It makes the same promises as the plane between processes. A handle is valid only in the process that made it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading

import msgspec
import torch

from holdfast.backends.common.block_copy import BlockCopyPlane, HeldRegion, RegionAccess, contiguous_address, forged
from holdfast.backends.common.shareable_memory import (
    OpenMemory,
    allocate_shareable,
    descriptor_of,
    is_lent,
    move_to_huge_pages,
)
from holdfast.comms.errors import Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.onesided.region_owner import closed
from holdfast.comms.tensors.exposed import ExposedMemory
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_process


class InprocAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address in a handle of the inproc plane: the process, and the number of the region in it.

    A number is never reused.
    """

    owner: Peer
    number: int


@functools.cache
def _process(pid: int) -> Peer:
    """The peer that describes this process; cached by process id, which changes in a fork."""
    return this_process()


_numbers = itertools.count(1)
_regions: dict[int, InprocRegion] = {}


def open_plane() -> InprocPlane:
    """A memory plane for this process alone. What it exposes is open until it is closed."""
    return InprocPlane()


class InprocRegion(HeldRegion):
    """An entry in this process's list of regions."""

    def __init__(self, plane: InprocPlane, memory: ExposedMemory, writable: bool) -> None:
        self.number, self.writable = next(_numbers), writable
        self.writing = threading.Lock()
        address = msgspec.msgpack.encode(InprocAddress(_process(os.getpid()), self.number))
        super().__init__(Handle(plane.name, address, memory.nbytes), memory)

    def close(self) -> None:
        with self.writing:
            self.open = False
        _regions.pop(self.number, None)


class InprocPlane(BlockCopyPlane):
    """See `MemoryPlane`."""

    name = "inproc"
    can_map = True

    def __init__(self) -> None:
        super().__init__()
        self._exposed: list[InprocRegion] = []

    def expose(self, tensor: torch.Tensor, writable: bool = False) -> InprocRegion:
        self._check_open()
        contiguous_address(tensor, "an exposed tensor", self.name)
        region = InprocRegion(self, ExposedMemory(tensor), writable)
        _regions[region.number] = region
        self._exposed = [each for each in self._exposed if each.open] + [region]
        return region

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        return allocate_shareable(nbytes, self._check_open) if mappable else super().empty(nbytes)

    def improve(self, memory: torch.Tensor) -> None:
        move_to_huge_pages(memory, self._check_open)

    def map(self, handle: Handle, *, lasting: bool) -> torch.Tensor:
        region = self._region(handle)
        exposed = region.memory.held
        descriptor = descriptor_of(exposed)
        if descriptor is None:
            raise Unsupported(
                "mapping this region", "read it: only a region in memory of empty(mappable=True) can be mapped"
            )
        with OpenMemory(self.name, _process(os.getpid()), descriptor) as memory:
            if lasting:
                memory.hold()
            region = self._region(handle)
            offset = exposed.data_ptr() - exposed.untyped_storage().data_ptr()
            return memory.map(offset, region.memory.nbytes)

    def is_lent(self, memory: torch.Tensor) -> bool:
        return is_lent(memory)

    def _open_region(self, handle: Handle, writing: bool) -> RegionAccess:
        region = self._region(handle)
        if writing and not region.writable:
            raise Unsupported("writing to a read-only region", "its owner must expose it with writable=True")
        return _LocalRegion(region)

    def _region(self, handle: Handle) -> InprocRegion:
        self._check_open()
        try:
            address = msgspec.msgpack.decode(handle.address, type=InprocAddress)
        except msgspec.DecodeError as error:
            raise forged(error) from error
        if address.owner != _process(os.getpid()):
            raise Unsupported(
                f"the inproc plane cannot reach process {address.owner.pid}",
                "between processes use plane 'shm'",
            )
        region = _regions.get(address.number)
        if region is None:
            raise closed(os.getpid())
        region.check()
        return region

    def close(self) -> None:
        self._closed = True
        for region in self._exposed:
            region.close()
        self._exposed.clear()


class _LocalRegion(RegionAccess):
    """A region of this process; keeps its memory alive for the length of a copy."""

    def __init__(self, region: InprocRegion) -> None:
        self._region, self._memory, self.nbytes = region, region.memory.address, region.memory.nbytes

    def pull(self, address: int, offset: int, nbytes: int) -> None:
        ctypes.memmove(address, self._memory + offset, nbytes)
        self._check()

    def push(self, address: int, offset: int, nbytes: int) -> None:
        with self._region.writing:
            self._check()
            ctypes.memmove(self._memory + offset, address, nbytes)

    def release(self, unharmed: bool) -> None:
        """Does nothing: only the tensor is held."""

    def _check(self) -> None:
        if not self._region.open:
            raise closed(os.getpid())
