"""A memory plane with regions that processes of the same host map. Subclasses move bytes between hosts.

A region in memory of `empty(mappable=True)` has a row in the `region_table` of its owner; its address names the memfd
and the row. A reader that finds the row's generation after it has opened the memfd has opened that region.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack

import torch

from holdfast.backends.common.block_copy import CheckedPlane, TableRegion
from holdfast.backends.common.region_table import TableAddress, generation_in, open_table
from holdfast.backends.common.shareable_memory import (
    MappedMemory,
    OpenMemory,
    allocate_shareable,
    descriptor_of,
    is_lent,
    move_to_huge_pages,
)
from holdfast.comms.errors import RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.liveness import this_host


class MappablePlane(CheckedPlane):
    """A memory plane with handles that tell where a region lies on its host."""

    can_map = True

    def _begin_mapping(self) -> None:
        """Begin without mappings and regions: in a new plane, and in that of a forked child."""
        self._mapped = MappedMemory()
        self._regions: set[TableRegion] = set()

    @abstractmethod
    def _place(self, handle: Handle) -> TableAddress | None:
        """Where the region of a handle lies; None if that is not known. Raises `CorruptData`."""

    def empty(self, nbytes: int, *, mappable: bool = False) -> torch.Tensor:
        return allocate_shareable(nbytes, self._check_open) if mappable else super().empty(nbytes)

    def improve(self, memory: torch.Tensor) -> None:
        move_to_huge_pages(memory, self._check_open)

    def map(self, handle: Handle, *, lasting: bool) -> torch.Tensor:
        place, (descriptor, offset) = self._mappable(handle)
        with OpenMemory(self.name, place.owner, descriptor) as memory:
            if lasting:
                memory.hold()
            _check_open(self.name, place)  # after the lock was taken: it stays as it is
            if lasting:
                return memory.map(offset, handle.nbytes)
            return self._mapped.get(memory, offset, handle.nbytes)

    def is_lent(self, memory: torch.Tensor) -> bool:
        return is_lent(memory)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._release)
            stack.callback(self._mapped.clear)
            for region in list(self._regions):
                stack.callback(region.close)

    @abstractmethod
    def _release(self) -> None:
        """Release everything else, once all regions are closed."""

    def _mappable(self, handle: Handle) -> tuple[TableAddress, tuple[int, int]]:
        """The place of a region, its memfd and its first byte there. Raises `Unsupported`."""
        self._check_open()
        place = self._place(handle) if handle.plane == self.name else None
        if place is None or place.memory is None or place.owner.host != this_host():
            raise Unsupported("mapping this region", "only what lies in memory of empty() on this host can be mapped")
        return place, place.memory


def _check_open(plane: str, place: TableAddress) -> None:
    """Raise `RegionGone` unless a region of this host is open now."""
    with open_table(plane, place) as (descriptor, _):
        if generation_in(descriptor, place.slot) != place.generation:
            raise RegionGone(f"process {place.owner.pid} closed the region; it must not be used any more")


def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The memfd that a tensor lies in, and its first byte there; None if it is other memory."""
    descriptor = descriptor_of(tensor)
    return None if descriptor is None else (int(descriptor), tensor.data_ptr() - tensor.untyped_storage().data_ptr())
