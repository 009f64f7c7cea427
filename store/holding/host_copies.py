"""Copies of parts that a reader makes for its host, and serves to readers of other hosts.

`holdfast.store.catalog.fan_out` assigns the source; this waits for it, reads, and lists the copy.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from holdfast.comms.errors import HoldfastError
from holdfast.comms.memory_plane import MemoryPlane, Region
from holdfast.store.catalog import fan_out
from holdfast.store.catalog.client import CatalogClient, GroupClient
from holdfast.store.catalog.fan_out import ABOVE
from holdfast.store.catalog.records import Catalog, Holder, PartKey, Replica, ServingCopy, Shard, Version
from holdfast.store.holding.memory_pool import MemoryPool
from holdfast.store.read.filling import copy_part
from holdfast.store.read.part_source import PartSource, ReportCorrupt, sources_for

LOOK_SECONDS = 0.2
"""Seconds between two looks for processes that died: no event of the register tells of them."""
STALLED_SECONDS = 5.0
SLOW_READ = 100e6
"""Bytes a second. A reader that neither finishes a part at this speed, plus `STALLED_SECONDS`, is passed over."""

_log = logging.getLogger("holdfast.store")


@dataclass(slots=True)
class _KeptCopy:
    region: Region
    memory: torch.Tensor


class HostCopies:
    """The copies that one store of this process makes. Thread-safe."""

    def __init__(
        self, client: CatalogClient, plane: MemoryPlane, pool: MemoryPool, reader: Holder, report: ReportCorrupt
    ) -> None:
        self._catalog_client, self._plane, self._pool, self._reader = client, plane, pool, reader
        self._report = report
        self._group: GroupClient | None = None
        self._lock = threading.Lock()
        self.kept: dict[PartKey, _KeptCopy] = {}
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
            if self._group is None:
                return
            try:
                self._group.change(lambda now: fan_out.remove_readers(now, {self._reader.id}))
            except HoldfastError as error:
                _log.warning("left a group of readers without telling the others: %s", error)
            self._group.close()
            self._group = None
            kept, self.kept = list(self.kept.values()), {}
        for each in kept:
            each.region.close()

    # -- under the lock

    def _nearest(self, catalog: Catalog, version: Version, shard: Shard, deadline: float) -> Replica | None:
        key = (version.number, shard.part, shard.digest)
        if (kept := self.kept.get(key)) is not None:
            return Replica(self._reader.id, kept.region.handle)
        if self._group is None:
            self._group = GroupClient(self._catalog_client.url, self._catalog_client.name, self._reader.peer.host)
        self._drop_others(self._group, version.number)
        if not fan_out.worthwhile(catalog, shard, self._reader.peer.host):
            return None
        try:
            return self._share(self._group, catalog, version, shard, deadline)
        except HoldfastError as error:
            _log.info("version %d part %d is read without a copy for this host: %s", *key[:2], error)
            self._withdraw(self._group, key)
            return None

    def _share(
        self, groups: GroupClient, catalog: Catalog, version: Version, shard: Shard, deadline: float
    ) -> Replica | None:
        key = (version.number, shard.part, shard.digest)
        near, source = self._group_source(groups, key, shard, deadline)
        if near is not None or source is None:
            return near
        leads = source == ABOVE
        found = self._catalog_source(version, shard, deadline) if isinstance(source, str) else source
        if found is None:
            self._withdraw(groups, key)
            return None
        handle = self._read(groups, catalog, version, shard, found, deadline).region.handle
        groups.change(lambda now: fan_out.announce_in_group(now, *key, self._reader.id, handle))
        if leads:
            self._catalog_client.change(lambda now: fan_out.announce_copy(now, *key, self._reader.id, handle))
        return Replica(self._reader.id, handle)

    def _group_source(
        self, groups: GroupClient, key: PartKey, shard: Shard, deadline: float
    ) -> tuple[Replica | None, Replica | str | None]:
        """The host's copy, or the source that the group assigns. Neither if there is none before the deadline."""
        waits = _Waits(shard)
        while True:
            at, group = groups.change(lambda now: fan_out.request_in_group(now, *key, self._reader))
            there = group.part(*key)
            if (copy := fan_out.copy_on(group, there, self._reader.peer.host)) is not None:
                return copy, None
            if source := fan_out.source_of(there, self._reader.id):
                return None, source
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set() or not fan_out.asks(group, there, self._reader.peer.host):
                self._withdraw(groups, key)
                return None, None
            if groups.wait(at, min(left, LOOK_SECONDS)) is None:
                groups.remove_dead_readers()
                for reader in waits.stalled(there.copies, self._reader.id):
                    self._pass_over(groups, key, reader)

    def _catalog_source(self, version: Version, shard: Shard, deadline: float) -> Replica | None:
        """The source that the catalogue assigns to the leader of a group; None if there is none before the deadline."""
        key = (version.number, shard.part, shard.digest)
        waits = _Waits(shard)
        while True:
            at, catalog = self._catalog_client.change(lambda now: fan_out.request_copy(now, *key, self._reader))
            now, there = catalog.version(key[0]), catalog.shard(*key[:2])
            mine = next((each for each in there.copies if each.reader == self._reader.id), None) if there else None
            if now is None or there is None or mine is None:
                return None
            if mine.source:
                return sources_for(catalog, now, there, self._reader)[0]
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set():
                return None
            if self._catalog_client.wait(at, min(left, LOOK_SECONDS)) is None:
                self._catalog_client.remove_dead_holders()
                for reader in waits.stalled(there.copies, self._reader.id):
                    self._pass_over(None, key, reader)

    def _read(
        self,
        groups: GroupClient,
        catalog: Catalog,
        version: Version,
        shard: Shard,
        found: Replica,
        deadline: float,
    ) -> _KeptCopy:
        key = (version.number, shard.part, shard.digest)
        source = PartSource(self._plane, catalog, version, shard, deadline, self._report)
        source.prefer(found)
        with self._pool.allocating(time.monotonic(), version.number) as allocate:
            memory = allocate(source.nbytes)
            copy_part(source, memory[: source.nbytes])
            kept = _KeptCopy(self._plane.expose(memory[: source.nbytes]), memory)
        self.kept[key] = kept
        self._pool.touch_ahead()
        if source.replica != found:
            self._pass_over(groups, key, found.holder)
        return kept

    def _pass_over(self, groups: GroupClient | None, key: PartKey, reader: str) -> None:
        """Withdraw the copy, or the request, of another reader, which is slow or cannot be read."""
        if groups is not None:
            groups.change(lambda now: fan_out.withdraw_in_group(now, *key, reader))
        self._catalog_client.change(lambda now: fan_out.withdraw_copy(now, *key[:2], reader))

    def _drop_others(self, groups: GroupClient, number: int) -> None:
        """Let the copies of other versions go."""
        for key in [key for key in self.kept if key[0] != number]:
            self._withdraw(groups, key)
            kept = self.kept.pop(key)
            kept.region.close()
            self._pool.give_back(kept.memory)

    def _withdraw(self, groups: GroupClient, key: PartKey) -> None:
        """Withdraw a copy or a request. Without effect while the register is away: others pass over it then."""
        try:
            groups.change(lambda now: fan_out.withdraw_in_group(now, *key, self._reader.id))
            self._catalog_client.change(lambda now: fan_out.withdraw_copy(now, *key[:2], self._reader.id))
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
