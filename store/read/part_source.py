"""Reads the bytes of one part from its holders: mapped where they can be, else copied; verified in both cases.

If a replica fails, the next one is read.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
import xxhash

from holdfast.comms.errors import BackendUnavailable, CorruptData, HoldfastError, OpTimeout, RegionGone, Unsupported
from holdfast.comms.memory_plane import Handle, MemoryPlane
from holdfast.comms.transport.base import Peer
from holdfast.comms.transport.liveness import this_host, this_process
from holdfast.store.catalog.client import check_cancelled
from holdfast.store.catalog.records import Catalog, Replica, Shard, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.errors import StoreTimeout

READ_SECONDS = 1.0
SLOWEST_READ = 50e6
"""A read that takes longer than `READ_SECONDS`, and so many bytes a second, is given up, and another replica read."""
_log = logging.getLogger("holdfast.store")

ReportCorrupt = Callable[[int, int, str], None]
"""A callback for a replica with wrong bytes: version, part, holder's id."""


class PartSource:
    """The replicas of one part of a version, in the order in which they are read. For one thread.

    A replica that does not answer, because its host is cut off or slow, is tried again after the others, in rounds of
    growing patience until the deadline. With `only_round` all reads share that one round, and end with `StoreTimeout`
    after it.

    The current replica is either mapped (`mapped` is its region) or read with `read`.
    """

    def __init__(
        self,
        plane: MemoryPlane,
        catalog: Catalog,
        version: Version,
        shard: Shard,
        deadline: float,
        report: ReportCorrupt,
        only_round: int | None = None,
    ) -> None:
        self.version, self.shard, self.deadline = version.number, shard, deadline
        self._plane, self._report = plane, report
        self._catalog = catalog
        self._began = time.monotonic()
        self._replicas = deque(sources_for(catalog, shard, this_process()))
        self._failures: list[str] = []
        self._corrupt = False
        self._first_round, self._one_round, self._late = only_round or 0, only_round is not None, 0
        self._mapped: torch.Tensor | None = None
        self._opened = False

    @property
    def replica(self) -> Replica:
        """The replica that is read now. Raises the errors of `manifest` if there is none."""
        return self._current()

    def prefer(self, replica: Replica) -> None:
        """Read from a replica, or a copy, before all others."""
        self._replicas = deque([replica, *(each for each in self._replicas if each != replica)])
        self._opened, self._mapped = False, None

    @property
    def nbytes(self) -> int:
        """The size of the part's region."""
        return self.shard.replicas[0].handle.nbytes

    @property
    def what(self) -> str:
        return f"version {self.version} part {self.shard.part}"

    def mapped(self) -> torch.Tensor | None:
        """The region of the current replica, mapped; None if it must be read. Raises the errors of `manifest`."""
        while not self._opened:
            replica = self._current()
            try:
                self._mapped = self._plane.map(replica.handle, lasting=False)
            except (Unsupported, BackendUnavailable):
                self._mapped = None
            except RegionGone as error:
                self._drop(str(error))
                continue
            self._opened = True
        return self._mapped

    def mapped_for_devices(self) -> torch.Tensor | None:
        """The current replica, mapped so that CUDA can register it; None if it is gone."""
        try:
            return self._plane.map_read_only(self._current().handle)
        except RegionGone as error:
            self._drop(str(error))
            return None

    @property
    def is_mapped(self) -> bool:
        """Whether the current replica has been mapped."""
        return self._mapped is not None

    def map_for_good(self) -> torch.Tensor:
        """The region of a replica, mapped so that it lasts. Raises `Unsupported` if none can be mapped."""
        while True:
            try:
                return self._plane.map(self._current().handle, lasting=True)
            except RegionGone as error:
                self._drop(str(error))

    def manifest(self) -> Manifest:
        """The part's manifest.

        Raises `RegionGone` if no replica can be read, `CorruptData` if some can and none is right, `StoreTimeout`.
        """
        start = self.shard.manifest_at
        if not 0 <= start <= self.nbytes:
            raise CorruptData(f"{self.what}: a manifest outside its region")
        while True:
            mapped = self.mapped()
            if mapped is None:
                data = torch.empty(self.nbytes - start, dtype=torch.uint8, device="cpu")
                if not self.read(start, data):
                    continue
            else:
                data = mapped[start:]
            with suppress(CorruptData):
                manifest = Manifest.decode(data.numpy().tobytes(), start)
                if manifest.digest == self.shard.digest:
                    return manifest
            self.reject(start)

    def read(self, offset: int, into: torch.Tensor) -> bool:
        """Read bytes of the current replica, unverified; return False if it is gone or late, and the next comes now.

        Raises the errors of `manifest`.
        """
        replica = self._current()
        patience = self._patience(into.nbytes)
        try:
            self._plane.read(replica.handle, into, offset, timeout=patience).wait()
        except RegionGone as error:
            self._drop(str(error))
            return False
        except OpTimeout:
            self._postpone(patience)
            return False
        return True

    def read_beside(self, handle: Handle, into: torch.Tensor) -> bool:
        """Read a delta of this part, unverified; whether it arrived in the time that reading it may take."""
        patience = min(self.left() / 2, READ_SECONDS + into.nbytes / SLOWEST_READ)
        try:
            self._plane.read(handle, into, timeout=patience).wait()
        except (RegionGone, OpTimeout, CorruptData) as error:
            _log.debug("%s is read whole: its delta cannot be read: %s", self.what, error)
            return False
        return True

    def reject(self, offset: int) -> None:
        """Go on to the next replica, because the current one has wrong bytes at `offset`, or was closed meanwhile.

        Raises the errors of `manifest` if there is no other.
        """
        replica = self._current()
        if self._is_open(replica):
            self._corrupt = True
            self._report(self.version, self.shard.part, replica.holder)
            self._drop(f"holder {replica.holder} has wrong bytes at {offset}")
        self._current()

    def confirm(self) -> bool:
        """Whether the current replica is still open, so what was read of its mapping until now was its bytes.

        If not, go on to the next replica. Raises the errors of `manifest` if there is no other.
        """
        try:
            self._plane.map(self._current().handle, lasting=False)
        except RegionGone as error:
            self._drop(str(error))
            self._current()
            return False
        return True

    def of_this_host(self) -> Iterator[tuple[Peer, Replica]]:
        """The replicas of this host that are left, and their processes."""
        for replica in list(self._replicas):
            holder = self._catalog.holder(replica.holder)
            if holder is not None and holder.peer.host == this_host():
                yield holder.peer, replica

    def check_open(self, replica: Replica) -> None:
        """Raise `RegionGone` or `OpTimeout` unless a replica can still be read."""
        probe = torch.empty(1, dtype=torch.uint8, device="cpu")
        self._plane.read(replica.handle, probe, timeout=max(self._patience(1), 0.1)).wait()

    def _is_open(self, replica: Replica) -> bool:
        """Whether the current replica can be read; drops it if not."""
        try:
            self.check_open(replica)
        except (RegionGone, OpTimeout) as error:
            self._drop(str(error))
            return False
        return True

    def left(self) -> float:
        """Seconds until the deadline. Raises `StoreTimeout` once it has passed, `CallCancelled` if that happened."""
        check_cancelled()
        left = self.deadline - time.monotonic()
        if left < 0:
            raise self.late()
        return left

    def late(self) -> StoreTimeout:
        """The error of a read that was not in time."""
        why = "; ".join((*self._failures, "the time was up before the last byte"))
        return StoreTimeout("get", self.version, time.monotonic() - self._began, why)

    def _current(self) -> Replica:
        if self._replicas:
            return self._replicas[0]
        kind: type[HoldfastError] = CorruptData if self._corrupt else RegionGone
        raise kind(f"no replica of {self.what} can be read: {'; '.join(self._failures) or 'there is none'}")

    def _patience(self, nbytes: int) -> float:
        """Seconds that a read may take.

        They double in each round, and are at most half of those left while other replicas are untried.

        Raises `StoreTimeout` after the deadline.
        """
        left, there = self.left(), max(len(self._replicas), 1)
        usual = (READ_SECONDS + nbytes / SLOWEST_READ) * float(1 << self._first_round + self._late // there)
        return min(left / 2 if self._late + 1 < there else left, usual)

    def _postpone(self, patience: float) -> None:
        """Try the current replica, which did not answer, after all others."""
        self._late += 1
        self._failures.append(f"holder {self._current().holder} did not answer within {patience:.2g} s")
        self._replicas.rotate(-1)
        self._opened, self._mapped = False, None
        if self._one_round and self._late >= len(self._replicas):
            raise self.late()

    def _drop(self, why: str) -> None:
        self._failures.append(why)
        self._replicas.popleft()
        self._opened, self._mapped = False, None


def sources_for(catalog: Catalog, shard: Shard, reader: Peer) -> tuple[Replica, ...]:
    """The replicas of a part in the order in which a reader should try them.

    First its own memory, then that of its host; then the others in an order that differs by reader, holders that leave
    last.
    """

    def preference(replica: Replica) -> tuple[bool, bool, bool, int]:
        holder = catalog.holder(replica.holder)
        peer = holder.peer if holder is not None else None
        near = peer is not None and peer.host == reader.host
        leaving = holder is None or not catalog.stays(holder)
        order = xxhash.xxh3_64_intdigest(f"{reader.host} {reader.pid} {replica.holder}".encode())
        return peer != reader, not near, leaving, order

    return tuple(sorted(shard.replicas, key=preference))
