"""Reads parts from the copy that their publisher has on the GPU of the targets: one copy within the device.

What cannot be read there is left to the part's region on the host, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.comms.errors import BackendUnavailable, HoldfastError, RegionGone
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import is_gone
from holdfast.store.catalog.records import DeviceAddress, Replica
from holdfast.store.data import device_copy, device_memory
from holdfast.store.data.digests import LEAST_BYTES, NBYTES, SOURCE, Words
from holdfast.store.read.part_plan import Indexes
from holdfast.store.read.part_source import PartSource
from holdfast.store.read.part_targets import PartTargets

MOST_OPEN = 16
"""The number of copies that a reader keeps open: each publisher has a few, which it uses again and again."""
_log = logging.getLogger("holdfast.store")

TellUnused = Callable[[int, int, str, str], None]
"""A callback for a copy that was not read, or not whole: version, part, holder's id, why."""


@dataclass(slots=True)
class DeviceReadCounts:
    """How many parts were read from a copy on the device, and how often one was there and could not be used."""

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
        gpu = device_memory.ipc.gpu(device)
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
                known = peer, device_memory.open_memory(address, device)
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
                    raise BackendUnavailable("CUDA", device_copy.digests.refused, "the log says more")
                begun.append((mine, digested))
    finally:
        under_way.wait()
    for mine, digested in begun:
        sums[mine] = digested()
    return sums
