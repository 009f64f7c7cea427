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
from holdfast.store import transitions
from holdfast.store.book import Book
from holdfast.store.catalog import Catalog, Holder, Replica, Shard, Version
from holdfast.store.deaths import Deaths
from holdfast.store.reader import PartReader

TURN_SECONDS = 0.1
SLOW_COPY = 1e9
"""Bytes a second. The next holder in turn waits `TURN_SECONDS` plus a copy at this speed for the one before it."""
PULL_SECONDS = 60.0
"""Seconds that the copy of one replica may take."""
IDLE_SECONDS = 1.0
RETRY_SECONDS = 0.1
SPARE_BUFFERS = 2
ROUNDING = 64 << 10

Key = tuple[int, int, bytes]
"""Version, part, digest."""
Observe = Callable[[str, dict[str, object]], None]
"""A callback for events of this process's store, called with name and fields in the thread of the event.

Publishers emit "copied", "announced" and "published" (version, part, bytes); holders "replica_made" (version, part),
"holders_died" (pids) and, as readers do, "replica_condemned" (version, part, holder). The store whose change removed a
visible version emits "lost" (version) if its last replica went with a holder, else "retired" (version).
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


class Keeper:
    """The replicas of one store in this process, and, if it holds parts of other publishers, its threads."""

    def __init__(self, book: Book, plane: MemoryPlane, holder: Holder, observe: Observe) -> None:
        self.holder = holder
        self._book, self._plane, self._observe = book, plane, observe
        self._lock = threading.Lock()
        self._kept: dict[Key, _Kept] = {}
        self._spare: list[torch.Tensor] = []
        self._due: dict[Key, float] = {}
        self._closing = threading.Event()
        self._deaths = Deaths(self._bury)
        self._thread = threading.Thread(target=self._run, name="holdfast-store-keeper", daemon=True)

    def start(self) -> None:
        """Enter the catalogue and start the threads."""
        self._book.bury_dead()
        self._book.change(lambda catalog: transitions.join(catalog, self.holder))
        self._deaths.start()
        self._thread.start()

    def close(self, patience: float) -> None:
        """Wait up to `patience` seconds for others to copy the replicas of this process, then leave the catalogue.

        The caller closes the plane before `join`.
        """
        deadline = time.monotonic() + patience
        try:
            at, catalog = self._book.change(lambda now: transitions.leave(now, self.holder.id))
            while (left := deadline - time.monotonic()) > 0 and not transitions.may_depart(catalog, self.holder.id):
                at, catalog = self._book.wait(at, left) or (at, catalog)
            self._closing.set()
            self._book.change(lambda now: transitions.depart(now, self.holder.id))
        except HoldfastError as error:
            _log.warning("left the store without telling the others: %s", error)
        self._closing.set()
        self._deaths.close()

    def join(self) -> None:
        """Wait for the thread, and close all replicas."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
            self._spare.clear()
        for each in kept:
            each.region.close()

    # -- the replicas of this process

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of at least `nbytes` for a part: that of a dropped part if it fits.

        To touch fresh memory costs more than to copy.
        """
        with self._lock:
            fits = [each for each in self._spare if nbytes <= each.nbytes <= 2 * nbytes + ROUNDING]
            if fits:
                best = min(fits, key=lambda each: each.nbytes)
                self._spare = [each for each in self._spare if each is not best]
                return best
        return self._plane.empty(-(-nbytes // ROUNDING) * ROUNDING)

    def give_back(self, memory: torch.Tensor) -> None:
        """Return memory of `allocate` for reuse."""
        with self._lock:
            self._spare = [memory, *self._spare][:SPARE_BUFFERS]

    def keep(self, key: Key, memory: torch.Tensor, nbytes: int) -> Replica:
        """Expose a part. It stays at least until the same caller calls `decide`."""
        region = self._plane.expose(memory[:nbytes])
        with self._lock:
            kept = self._kept.setdefault(key, _Kept(region, memory))
            kept.bringing += 1
        if kept.region is not region:
            region.close()
            self.give_back(memory)
        return Replica(self.holder.id, kept.region.handle)

    def decide(self, key: Key, at: int, catalog: Catalog) -> bool:
        """Let the catalogue decide from now on whether a part stays; call it once for each `keep`.

        `catalog` is the catalogue at the register's version `at`. Returns whether the part stays.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.bringing -= 1
                kept.listed = max(kept.listed, at)
        self._let_go(at, catalog)
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
            kept.region.close()
            self.give_back(kept.memory)

    # -- in the background

    def _run(self) -> None:
        seen, failing = 0, False
        while not self._closing.is_set():
            try:
                seen, catalog = self._book.wait(seen, self._patience()) or self._book.read()
                self._deaths.watch(catalog.peers())
                self._let_go(seen, catalog)
                self._own_up(catalog)
                self._replicate(catalog)
                failing = False
            except HoldfastError as error:
                if not (failing or self._closing.is_set()):
                    _log.warning("the store's keeper goes on trying: %s", error)
                failing = True
                self._closing.wait(RETRY_SECONDS)
            except Exception:
                _log.exception("the store's keeper goes on trying")
                self._closing.wait(IDLE_SECONDS)

    def _own_up(self, catalog: Catalog) -> None:
        """Retract catalogue entries for replicas that this process does not hold.

        They come from changes that were made although the register seemed to be away.
        """
        if not _handles(catalog, self.holder.id) <= self._handles_now():
            self._book.change(lambda now: transitions.disown(now, self.holder.id, self._handles_now()))

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
        ready = [key for key, due in self._due.items() if due <= now]
        if not ready:
            return
        key = min(ready, key=lambda each: (lacking[each][0].visible, -each[0], each[1]))
        self._due[key] = now + RETRY_SECONDS
        self._pull(key, catalog, *lacking[key])

    def _pull(self, key: Key, catalog: Catalog, version: Version, shard: Shard) -> None:
        deadline = time.monotonic() + PULL_SECONDS
        reader = PartReader(self._plane, catalog, version, shard, deadline, self.condemn)
        memory = self.allocate(reader.nbytes)
        try:
            reader.everything(memory[: reader.nbytes])
        except RegionGone as error:
            _log.debug("cannot make a replica yet: %s", error)
            self.give_back(memory)
            self._book.bury_dead()
            return
        except HoldfastError:
            self.give_back(memory)
            raise
        replica = self.keep(key, memory, reader.nbytes)
        try:
            at, after = self._book.change(
                lambda now: transitions.replicated(now, version.number, shard.part, shard.digest, replica)
            )
        except HoldfastError:
            self.decide(key, *self._book.newest())
            raise
        if self.decide(key, at, after):
            self._observe("replica_made", {"version": version.number, "part": shard.part})

    def condemn(self, number: int, part: int, holder_id: str) -> None:
        """Remove a replica with wrong bytes from the catalogue, and report it."""
        _log.warning("version %d part %d of holder %s has wrong bytes", number, part, holder_id)
        self._book.change(lambda now: transitions.drop_replica(now, number, part, holder_id))
        self._observe("replica_condemned", {"version": number, "part": part, "holder": holder_id})

    def _bury(self, dead: frozenset[Peer]) -> None:
        self._book.change(lambda now: transitions.bury(now, dead))
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
