"""Copies of parts on the device of their publisher, for readers of the same host and GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.ft.state.boxes import Box
from holdfast.store.catalog.records import DeviceAddress
from holdfast.store.data import device_memory
from holdfast.store.data.dense import flat_bytes, is_dense
from holdfast.store.data.device_copy import CopiesToDevices, on_device
from holdfast.store.data.manifest import LARGE_BYTES
from holdfast.store.data.packing import PackedPart

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
        """Copy a part that was packed to the device that most of its tensors are on; None if they are on the host.

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
        memory = device_memory.ipc.allocate(nbytes, device)
        return DeviceCopy(memory, device_memory.share(memory))


def _pairs(
    packed: PackedPart, tensors: Sequence[torch.Tensor], into: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What fills a copy of a part, and where: from the device what lies there in order, the rest from the part."""
    layout = packed.manifest.layout
    small = next((each.offset for each in layout.entries if each.nbytes >= LARGE_BYTES), layout.data_bytes)
    pairs = [(packed.memory[:small], into[:small])] if small else []
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        if entry.nbytes >= LARGE_BYTES:
            span = slice(entry.offset, entry.offset + entry.nbytes)
            there = tensor.device == into.device and is_dense(tensor)
            pairs.append((flat_bytes(tensor) if there else packed.memory[span], into[span]))
    return pairs
