"""The background work of a holder: make missing replicas, detect dead holders, drop superseded versions.

One thread waits for the catalogue to change and acts on it, another (`deaths`) waits for processes to end. Both are
idle while nothing changes, except for the register's own way of waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.comms.errors import HoldfastError, RegionGone
from holdfast.comms.memory_plane import Handle, MemoryPlane, Region
from holdfast.comms.transport.base import Peer
from holdfast.store.casts.cast_maker import CastMaker
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.records import Catalog, Holder, PartKey, Replica, Shard, Version
from holdfast.store.data.delta import PackedDelta
from holdfast.store.errors import StoreFull, StoreTimeout
from holdfast.store.holding.memory_pool import MemoryPool
from holdfast.store.holding.watchers import DeathWatcher, HostWatcher, keep_trying
from holdfast.store.read.device_copies import DeviceCopies, DeviceCopy
from holdfast.store.read.filling import copy_part
from holdfast.store.read.part_source import PartSource

TURN_SECONDS = 0.1
SLOW_COPY = 1e9
"""Bytes a second. The next holder in turn waits `TURN_SECONDS` plus a copy at this speed for the one before it."""
PULL_SECONDS = 60.0
"""Seconds that the copy of one replica may take."""
MOST_PATIENT_ROUND = 4
"""A holder that copies from a host that does not answer is busy for about `READ_SECONDS`, then twice as long, ...,
until this round: it has other parts to copy."""
IDLE_SECONDS = 1.0
RETRY_SECONDS = 0.1

Observe = Callable[[str, dict[str, object]], None]
"""A callback for events of this process's store, called with name and fields in the thread of the event.

Publishers emit "copied", "announced" and "published" (version, part, bytes); holders "replica_made" (version, part,
seconds, cpu), "cast_made" (version, part, cast), "holders_died" (pids) and, as readers do, "replica_corrupt" (version,
part, holder). Readers emit "device_copy_unused" (version, part, holder, why). `cpu` are the processor seconds of the
thread.
The store that removed a visible version emits "lost" (version) if its last replica went with a holder, else
"retired" (version). The store that found that a host is away, or back, emits "host_away" or "host_back" (host, hosts):
replicas are spread over `hosts` hosts from then on.
"""
_log = logging.getLogger("holdfast.store")


@dataclass(slots=True)
class _Kept:
    """A part in this process. It stays while `bringing` calls of this process still publish or copy it.

    From the register's version `listed` on, the catalogue decides whether it stays.
    """

    region: Region
    memory: torch.Tensor
    bringing: int = 0
    listed: int = 0
    delta: tuple[Region, torch.Tensor] | None = None
    device: DeviceCopy | None = None


class ReplicaHolder:
    """The replicas of one store in this process, and, if it holds parts of other publishers, its threads."""

    def __init__(
        self, client: CatalogClient, plane: MemoryPlane, pool: MemoryPool, holder: Holder, observe: Observe
    ) -> None:
        self.holder = holder
        self._catalog_client, self._plane, self._observe = client, plane, observe
        self._lock = threading.Lock()
        self._kept: dict[PartKey, _Kept] = {}
        self.pool = pool
        pool.make_room = self._drop_delta
        self.device_copies = DeviceCopies()
        self._casts = CastMaker(client, plane, pool, holder, self.memory_of, self._tell_cast)
        self._due: dict[PartKey, float] = {}
        self._rounds: dict[PartKey, int] = {}
        """How often the copy of a part has failed because its holders did not answer."""
        self._closing = threading.Event()
        self._seen = 0
        self._deaths = DeathWatcher(self._remove_dead)
        self._hosts = HostWatcher(client, holder)
        self._thread = threading.Thread(target=self._run, name="holdfast-store-holder", daemon=True)

    def start(self) -> None:
        """Enter the catalogue and start the threads."""
        self._catalog_client.remove_dead_holders()
        self._catalog_client.change(lambda catalog: transitions.join(catalog, self.holder))
        self._deaths.start()
        self._thread.start()

    def close(self, patience: float) -> None:
        """Wait up to `patience` seconds for others to copy the replicas of this process, then leave the catalogue.

        The caller closes the plane before `join`.
        """
        deadline = time.monotonic() + patience
        self._catalog_client.patience = 0.0  # nothing is lost by an end without a register
        try:
            at, catalog = self._catalog_client.change(lambda now: transitions.leave(now, self.holder.id))
            while (left := deadline - time.monotonic()) > 0 and not transitions.may_depart(catalog, self.holder.id):
                at, catalog = self._catalog_client.wait(at, left) or (at, catalog)
            self._closing.set()
            self._catalog_client.change(lambda now: transitions.depart(now, self.holder.id))
        except HoldfastError as error:
            _log.warning("left the store without telling the others: %s", error)
        self.stop()

    def stop(self) -> None:
        """End the background work without a word to the others. Idempotent."""
        self._closing.set()
        self._casts.stop()
        self._deaths.close()
        self._hosts.close()

    def join(self) -> None:
        """Wait for the thread, and close all replicas."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._casts.join()
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for each in kept:
            self._close(each)
        self.pool.close()
        self.device_copies.close()

    def rejoined(self, catalog: Catalog) -> Catalog:
        """The catalogue with this store, which may have been removed while its host was away; not once it closes."""
        return catalog if self._closing.is_set() else transitions.join(catalog, self.holder)

    # -- the replicas of this process

    def keep(self, key: PartKey, memory: torch.Tensor, nbytes: int, device: DeviceCopy | None = None) -> Replica:
        """Expose a part, and its copy on a device. It stays at least until the same caller calls `decide`."""
        offered = _Kept(self._plane.expose(memory[:nbytes]), memory, device=device)
        with self._lock:
            kept = self._kept.setdefault(key, offered)
            kept.bringing += 1
        if kept is not offered:
            self._close(offered)
        return Replica(self.holder.id, kept.region.handle, None if kept.device is None else kept.device.address)

    def decide(self, key: PartKey, at: int, catalog: Catalog) -> bool:
        """Let the catalogue decide from now on whether a part stays; call it once for each `keep`.

        `catalog` is the catalogue at the register's version `at`. Returns whether the part stays.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.bringing -= 1
                kept.listed = max(kept.listed, at)
        self._let_go(at, catalog)
        self.pool.touch_ahead()
        with self._lock:
            return key in self._kept

    def _let_go(self, at: int, catalog: Catalog) -> None:
        """Close the replicas that the catalogue of the register's version `at` no longer lists."""
        listed = _handles(catalog, self.holder.id)
        with self._lock:
            over = [
                key
                for key, kept in self._kept.items()
                if not kept.bringing and kept.listed <= at and kept.region.handle not in listed
            ]
            gone = [self._kept.pop(key) for key in over]
        for kept in gone:
            self._close(kept)

    def _close(self, kept: _Kept) -> None:
        kept.region.close()
        self.pool.give_back(kept.memory)
        if kept.device is not None:
            self.device_copies.give_back(kept.device)
        if kept.delta is not None:
            kept.delta[0].close()
            self.pool.give_back(kept.delta[1])

    # -- deltas

    @property
    def maps(self) -> bool:
        """Whether processes of this host map parts instead of reading them."""
        return self._plane.can_map

    def memory_of(self, key: PartKey) -> torch.Tensor | None:
        """The bytes of a part that this process keeps; they may change once the part is let go."""
        with self._lock:
            kept = self._kept.get(key)
        return None if kept is None else kept.memory[: kept.region.handle.nbytes]

    def attach(self, key: PartKey, delta: PackedDelta, base: bytes) -> Handle:
        """Expose what changed in a part that this process keeps since that with digest `base`.

        The delta counts towards the memory's limit. Raises `StoreFull` if that leaves no room.
        """
        step = 1 << max(delta.nbytes.bit_length() - 3, 0)  # so that the memory fits the next deltas too
        with self.pool.allocating(time.monotonic(), key[0], part=False) as allocate:
            memory = allocate(-(-delta.nbytes // step) * step)
            delta.write(memory[: delta.nbytes], base, key[2])
            region = self._plane.expose(memory[: delta.nbytes])
        with self._lock:
            kept = self._kept.get(key)
            known = None if kept is None else kept.delta
            if kept is not None and known is None:
                kept.delta = (region, memory)
                return region.handle
        region.close()
        self.pool.give_back(memory)
        if known is None:
            raise RegionGone(f"version {key[0]} part {key[1]} was let go while its delta was made")
        return known[0].handle

    def _drop_delta(self) -> bool:
        """Let the oldest delta go, which readers can do without, as a part needs its room; whether there was one."""
        with self._lock:
            key = min((key for key, kept in self._kept.items() if kept.delta is not None), default=None)
            kept = None if key is None else self._kept[key]
            delta = None if kept is None else kept.delta
            if kept is None or delta is None:
                return False
            kept.delta = None
        delta[0].close()
        self.pool.give_back(delta[1])
        return True

    def _base_of(self, shard: Shard) -> torch.Tensor | None:
        """The part that the delta of `shard` starts from, if this process keeps it."""
        if shard.delta is None:
            return None
        with self._lock:
            keys = [key for key in self._kept if key[2] == shard.delta.base]
        return self.memory_of(keys[0]) if keys else None

    # -- in the background

    def _run(self) -> None:
        keep_trying(self._turn, self._closing, "the replica holder of the store")

    def _turn(self) -> None:
        self._seen, catalog = self._catalog_client.wait(self._seen, self._patience()) or self._catalog_client.read()
        if catalog.holder(self.holder.id) is None:  # its host was away
            self._seen, catalog = self._catalog_client.change(self.rejoined)
        self._deaths.watch(catalog.peers())
        self._hosts.follow(catalog)
        self._let_go(self._seen, catalog)
        self._casts.follow(self._seen, catalog)
        self._retract_missing(catalog)
        self._replicate(catalog)

    def _retract_missing(self, catalog: Catalog) -> None:
        """Retract catalogue entries for replicas that this process does not hold.

        They come from changes that were made although the register seemed to be away.
        """
        if not _handles(catalog, self.holder.id) <= self._handles_now():
            self._catalog_client.change(lambda now: transitions.retract(now, self.holder.id, self._handles_now()))

    def _handles_now(self) -> set[Handle]:
        with self._lock:
            return {each.region.handle for each in self._kept.values()}

    def _patience(self) -> float:
        """Seconds until the next replica is due, or `IDLE_SECONDS`."""
        return max(0.0, min(self._due.values(), default=time.monotonic() + IDLE_SECONDS) - time.monotonic())

    def _replicate(self, catalog: Catalog) -> None:
        """Make the most urgent replica that is due. That changes the catalogue, so the next turn follows at once."""
        now = time.monotonic()
        lacking = {}
        for version, shard, turn in transitions.missing(catalog, self.holder.id):
            key = (version.number, shard.part, shard.digest)
            lacking[key] = (version, shard)
            due = now + turn * (TURN_SECONDS + shard.replicas[0].handle.nbytes / SLOW_COPY)
            self._due[key] = min(self._due.get(key, due), due)
        self._due = {key: due for key, due in self._due.items() if key in lacking}
        self._rounds = {key: rounds for key, rounds in self._rounds.items() if key in lacking}
        ready = [key for key, due in self._due.items() if due <= now]
        if not ready:
            return
        key = min(ready, key=lambda each: (lacking[each][0].visible, -each[0], each[1]))
        self._due[key] = now + RETRY_SECONDS
        self._pull(key, catalog, *lacking[key])

    def _pull(self, key: PartKey, catalog: Catalog, version: Version, shard: Shard) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        deadline = began + PULL_SECONDS
        rounds = self._rounds.get(key, 0)
        source = PartSource(self._plane, catalog, version, shard, deadline, self.report_corrupt, rounds)
        try:
            with self.pool.allocating(time.monotonic(), version.number) as allocate:
                memory = allocate(source.nbytes)
                copy_part(source, memory[: source.nbytes], self._base_of(shard))
                replica = self.keep(key, memory, source.nbytes)
        except RegionGone as error:
            _log.debug("cannot make a replica yet: %s", error)
            self._catalog_client.remove_dead_holders()
            return
        except StoreFull:
            raise
        except StoreTimeout as error:
            _log.info("cannot make a replica yet: %s", error)
            self._rounds[key] = min(rounds + 1, MOST_PATIENT_ROUND)
            return
        try:
            at, after = self._catalog_client.change(
                lambda now: transitions.replicated(now, version.number, shard.part, shard.digest, replica)
            )
        except HoldfastError:
            self.decide(key, *self._catalog_client.newest())
            raise
        if self.decide(key, at, after):
            took = {"seconds": time.monotonic() - began, "cpu": time.thread_time() - cpu}
            self._observe("replica_made", {"version": version.number, "part": shard.part, **took})

    def report_corrupt(self, number: int, part: int, holder_id: str) -> None:
        """Remove a replica with wrong bytes from the catalogue, and report it."""
        _log.warning("version %d part %d of holder %s has wrong bytes", number, part, holder_id)
        self._catalog_client.change(lambda now: transitions.drop_replica(now, number, part, holder_id))
        self._observe("replica_corrupt", {"version": number, "part": part, "holder": holder_id})

    def _tell_cast(self, number: int, part: int, cast: str) -> None:
        self._observe("cast_made", {"version": number, "part": part, "cast": cast})

    def _remove_dead(self, dead: frozenset[Peer]) -> None:
        self._catalog_client.change(lambda now: transitions.remove_dead_holders(now, dead))
        self._observe("holders_died", {"pids": sorted(peer.pid for peer in dead)})


def _handles(catalog: Catalog, holder_id: str) -> set[Handle]:
    """The regions of the replicas that the catalogue lists for a holder."""
    return {
        replica.handle
        for version in catalog.versions
        for shard in version.shards
        for replica in shard.replicas
        if replica.holder == holder_id
    }
