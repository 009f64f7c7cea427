"""Packs the casts of parts that readers ask for, beside this process's replicas."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.comms.errors import CorruptData, HoldfastError, RegionGone
from holdfast.comms.memory_plane import MemoryPlane, Region
from holdfast.store.casts.wire_cast import WireCast, pack_form
from holdfast.store.catalog import part_casts
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.records import CastForm, Catalog, Holder, PartKey, Shard, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.holding.memory_pool import MemoryPool
from holdfast.store.holding.watchers import keep_trying

ROOM_SECONDS = 1.0
"""Seconds that a form waits for room in the store's memory."""
RETRY_SECONDS = 0.2
MemoryOf = Callable[[PartKey], torch.Tensor | None]
"""Finds the region of a part that this process keeps."""
_log = logging.getLogger("holdfast.store")


@dataclass(slots=True)
class _KeptForm:
    """A form in this process. From the register's version `listed` on, the catalogue decides whether it stays."""

    region: Region
    memory: torch.Tensor
    form: CastForm
    listed: float = math.inf


class CastMaker:
    """The cast forms that one store of this process packs, in a thread that starts with the first. Thread-safe.

    Their memory is the pool's. A form goes when the catalogue no longer lists it, at the latest with its version.
    """

    def __init__(
        self,
        client: CatalogClient,
        plane: MemoryPlane,
        pool: MemoryPool,
        holder: Holder,
        memory_of: MemoryOf,
        made: Callable[[int, int, str], None],
    ) -> None:
        self._client, self._plane, self._pool, self._holder = client, plane, pool, holder
        self._memory_of, self._made = memory_of, made
        self._lock = threading.Lock()
        self._kept: dict[tuple[PartKey, str], _KeptForm] = {}
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, at: int, catalog: Catalog) -> None:
        """Pack what the catalogue of the register's version `at` asks for; let go of what it no longer lists."""
        listed = {form.handle for _, _, form in part_casts.casts_of(catalog, self._holder.id, packed=True)}
        with self._lock:
            over = [key for key, kept in self._kept.items() if kept.listed <= at and kept.form.handle not in listed]
            gone = [self._kept.pop(key) for key in over]
            here = {kept.form.handle for kept in self._kept.values()}
        for kept in gone:
            self._close(kept)
        for version, shard, form in part_casts.casts_of(catalog, self._holder.id, packed=True):
            if form.handle not in here:  # a change that was made although the register seemed to be away
                self._withdraw(version, shard, form, "it is not there")
        if any(part_casts.casts_of(catalog, self._holder.id, packed=False)) and not self._closing.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-store-casts", daemon=True)
                self._thread.start()
            self._wake.set()

    def stop(self) -> None:
        """Pack no more. Idempotent."""
        self._closing.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread, and close all forms."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for each in kept:
            self._close(each)

    def _close(self, kept: _KeptForm) -> None:
        kept.region.close()
        self._pool.give_back(kept.memory)

    # -- in the thread

    def _run(self) -> None:
        keep_trying(self._make_all, self._closing, "the maker of casts", RETRY_SECONDS)

    def _make_all(self) -> None:
        self._wake.wait()
        self._wake.clear()
        try:
            while not self._closing.is_set():
                at, catalog = self._client.read()
                self.follow(at, catalog)
                found = next(part_casts.casts_of(catalog, self._holder.id, packed=False), None)
                if found is None:
                    return
                self._make(*found)
        except BaseException:
            self._wake.set()  # the next turn waits for no change
            raise

    def _make(self, version: Version, shard: Shard, form: CastForm) -> None:
        key = (version.number, shard.part, shard.digest)
        try:
            kept = self._pack(key, shard, form)
        except HoldfastError as error:
            if not self._closing.is_set():
                self._withdraw(version, shard, form, error)
            return
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._kept[key, form.cast] = kept
        if closing:
            self._close(kept)
            return
        made = kept.form
        try:
            at, catalog = self._client.change(lambda now: part_casts.announce_cast(now, *key, made))
        except HoldfastError:
            kept.listed = self._client.newest()[0]
            raise
        kept.listed = at
        self.follow(at, catalog)
        self._made(version.number, shard.part, form.cast)

    def _pack(self, key: PartKey, shard: Shard, form: CastForm) -> _KeptForm:
        region = self._memory_of(key)
        if region is None:
            raise RegionGone("it keeps the part no longer")
        manifest = Manifest.decode(region[shard.manifest_at :].numpy().data, shard.manifest_at)
        if manifest.digest != shard.digest:
            raise CorruptData("its replica has wrong bytes")
        with self._pool.allocating(time.monotonic() + ROOM_SECONDS, key[0]) as allocate:
            packed = pack_form(manifest, region, WireCast(form.cast), allocate, self._check_open)
            exposed = self._plane.expose(packed.memory[: packed.nbytes])
        made = CastForm(form.cast, self._holder.id, packed.digest, packed.manifest_at, exposed.handle)
        return _KeptForm(exposed, packed.memory, made)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RegionGone("its store is closing")

    def _withdraw(self, version: Version, shard: Shard, form: CastForm, why: object) -> None:
        _log.info("version %d part %d is not cast to %s: %s", version.number, shard.part, form.cast, why)
        self._client.change(lambda now: part_casts.withdraw_cast(now, version.number, shard.part, form))
