"""Copies of parts that a reader makes for its host, and serves to readers of other hosts.

`holdfast.store.catalog.fan_out` assigns the source; this waits for it, reads, and lists the copy.
"""

from __future__ import annotations

import logging
import threading
import time

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.comms.memory_plane import MemoryPlane, Region
from holdfast.store.catalog import fan_out
from holdfast.store.catalog.client import CatalogClient, GroupClient, gone
from holdfast.store.catalog.fan_out import LEAD, LEADERS, ServingCopy
from holdfast.store.catalog.records import Catalog, Holder, PartKey, Replica, Shard, Version
from holdfast.store.holding.memory_pool import MemoryPool
from holdfast.store.read.filling import copy_part
from holdfast.store.read.part_source import PartSource, ReportCorrupt

LOOK_SECONDS = 0.2
"""Seconds between two looks for processes that died: no event of the register tells of them."""
STALLED_SECONDS = 5.0
SLOW_READ = 100e6
"""Bytes a second. A reader that neither finishes a part at this speed, plus `STALLED_SECONDS`, is passed over."""

_log = logging.getLogger("holdfast.store")


class HostCopies:
    """The copies that one store of this process makes. Thread-safe."""

    def __init__(
        self, client: CatalogClient, plane: MemoryPlane, pool: MemoryPool, reader: Holder, report: ReportCorrupt
    ) -> None:
        self._catalog_client, self._plane, self._pool, self._reader = client, plane, pool, reader
        self._report = report
        self._groups: dict[int, GroupClient] = {}
        """The clients of the groups that were asked: of this host, and of leaders."""
        self._lock = threading.Lock()
        self.kept: dict[PartKey, tuple[Region, torch.Tensor]] = {}
        """The copies that this store serves."""
        self._closing = threading.Event()

    def nearest(self, catalog: Catalog, version: Version, shard: Shard, deadline: float) -> Replica | None:
        """The copy of a part that the readers of this host share, made now if there is none.

        None if its readers should use other sources: few hosts read, the host has a replica, or no copy could be made.
        """
        if not self.kept and not fan_out.worthwhile(catalog, shard, self._reader.peer.host):
            return None
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return None
        try:
            return None if self._closing.is_set() else self._nearest(catalog, version, shard, deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Withdraw and close all copies. Idempotent."""
        self._closing.set()
        with self._lock:
            for group in self._groups.values():
                try:
                    group.change(lambda now: fan_out.remove_readers(now, {self._reader.id}))
                except HoldfastError as error:
                    _log.warning("left a group of readers without telling the others: %s", error)
                group.close()
            self._groups.clear()
            kept, self.kept = list(self.kept.values()), {}
        for region, _ in kept:
            region.close()

    # -- under the lock

    def _nearest(self, catalog: Catalog, version: Version, shard: Shard, deadline: float) -> Replica | None:
        key = (version.number, shard.part, shard.digest)
        if (kept := self.kept.get(key)) is not None:
            return Replica(self._reader.id, kept[0].handle)
        self._drop_others(version.number)
        if not fan_out.worthwhile(catalog, shard, self._reader.peer.host):
            return None
        try:
            return self._share(catalog, version, shard, deadline)
        except HoldfastError as error:
            _log.info("version %d part %d is read without a copy for this host: %s", *key[:2], error)
            self._withdraw(key)
            return None

    def _share(self, catalog: Catalog, version: Version, shard: Shard, deadline: float) -> Replica | None:
        key, group = (version.number, shard.part, shard.digest), self._group(fan_out.group_of(self._reader.peer.host))
        found = self._ask(group, key, shard, (LEAD,), deadline)
        if leads := found is not None and found[0].source == LEAD:
            seeds = tuple(each.holder for each in shard.replicas if not catalog.is_away(each.holder))
            is_latest = key[0] == catalog.latest  # no host begins to copy another version
            found = self._ask(self._group(LEADERS), key, shard, seeds, deadline) if is_latest else None
        if found is None or (leads and found[0].handle is not None):  # the leaders have another store's copy
            self._withdraw(key)
        if found is None:
            return None
        mine, replica = found
        if mine.handle is not None:
            return Replica(mine.reader, mine.handle)
        source = PartSource(self._plane, catalog, version, shard, deadline, self._report)
        if replica is not None:
            source.prefer(replica)
        with self._pool.allocating(time.monotonic(), version.number) as allocate:
            memory = allocate(source.nbytes)
            copy_part(source, memory[: source.nbytes])
            region = self._plane.expose(memory[: source.nbytes])
        self.kept[key] = region, memory
        self._pool.touch_ahead()
        if replica is not None and source.replica != replica:
            self._withdraw(key, replica.holder)
        for each in self._groups.values():
            each.change(lambda now: fan_out.announce_copy(now, key, self._reader.id, region.handle))
        return Replica(self._reader.id, region.handle)

    def _ask(
        self, group: GroupClient, key: PartKey, shard: Shard, seeds: tuple[str, ...], deadline: float
    ) -> tuple[ServingCopy, Replica | None] | None:
        """This host's copy once it is complete or has a source, and that source; None if not before the deadline."""
        waits = _Waits(shard)
        while True:
            at, now = group.change(lambda now: fan_out.request_copy(now, key, self._reader, seeds))
            copies = now.part(key).copies
            mine = next((each for each in copies if each.peer.host == self._reader.peer.host), None)
            if mine is not None and mine.reader != self._reader.id and gone([mine.peer]):
                group.remove_dead_readers()
                continue
            if mine is not None and (mine.handle is not None or (mine.source and mine.reader == self._reader.id)):
                there = (Replica(each.reader, each.handle) for each in copies if each.handle is not None)
                return mine, next((each for each in (*there, *shard.replicas) if each.holder == mine.source), None)
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set() or mine is None:
                return None
            if group.wait(at, min(left, LOOK_SECONDS)) is None:
                group.remove_dead_readers(self._catalog_client.newest()[1].away)
                for reader in waits.stalled(copies, self._reader.id):
                    self._withdraw(key, reader)

    def _group(self, number: int) -> GroupClient:
        if number not in self._groups:
            self._groups[number] = GroupClient(self._catalog_client.url, self._catalog_client.name, number)
        return self._groups[number]

    def _drop_others(self, number: int) -> None:
        """Let the copies of other versions go."""
        for key in [key for key in self.kept if key[0] != number]:
            self._withdraw(key)
            region, memory = self.kept.pop(key)
            region.close()
            self._pool.give_back(memory)

    def _withdraw(self, key: PartKey, reader: str = "") -> None:
        """Withdraw a copy or a request of this store, or of a `reader` that is slow or cannot be read.

        Without effect while the register is away: others pass over it then.
        """
        try:
            if reader:
                self._group(LEADERS)  # it may lead
            for group in self._groups.values():
                group.change(lambda now: fan_out.withdraw_copy(now, key, reader or self._reader.id))
        except HoldfastError as error:
            _log.info("version %d part %d: a copy could not be withdrawn: %s", *key[:2], error)


class _Waits:
    """Finds the readers that have been reading a part for too long by this process's clock."""

    def __init__(self, shard: Shard) -> None:
        self._patience = STALLED_SECONDS + shard.replicas[0].handle.nbytes / SLOW_READ
        self._since: dict[ServingCopy, float] = {}

    def stalled(self, copies: tuple[ServingCopy, ...], me: str) -> list[str]:
        now = time.monotonic()
        reading = [each for each in copies if each.handle is None and each.source and each.reader != me]
        self._since = {each: self._since.get(each, now) for each in reading}
        return [each.reader for each, since in self._since.items() if now - since > self._patience]
