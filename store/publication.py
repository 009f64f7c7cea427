"""Publishes one part of a version: copies, exposes and announces it, and waits until other processes hold it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.comms.transport.liveness import this_host
from holdfast.ft.state.boxes import Box, whole
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.failure_domains import why_unsafe
from holdfast.store.catalog.records import Catalog, DeltaOffer, PartKey, Shard, Version
from holdfast.store.data.delta import diff, element_pieces
from holdfast.store.data.manifest import Manifest, check_shared, difference, tensors_of
from holdfast.store.data.packing import PackedPart, PartBlock, pack, pack_plain
from holdfast.store.data.state_dicts import FlatState
from holdfast.store.errors import StoreFull, StoreTimeout
from holdfast.store.holding.replica_holder import ReplicaHolder
from holdfast.store.read.part_source import PartSource
from holdfast.store.reshard.giving import given
from holdfast.store.reshard.placements import Blocks, PlacedTensor, place

COMPARE_SECONDS = 1.0
"""Seconds in which the manifests of other parts must be read; readers compare those that were not."""
_log = logging.getLogger("holdfast.store")


WIRE_BYTES_PER_SECOND = 1.2e9
"""The speed at which parts are taken to be read where they cannot be mapped: that of TCP."""


DIFF_SECONDS_PER_BYTE = 1 / 7e9
"""For each byte of a part, to find what changed (two threads that read both versions, 15 GB/s in all)."""
PATCH_SECONDS_PER_BYTE = 1 / 6e9
"""For each byte of a part, to make the new version beside its base and verify it."""
ROUND_TRIP_SECONDS = 0.5e-3
"""For one more read: a delta lies in a region of its own."""


def pays(delta_bytes: int, whole_bytes: int, bytes_per_second: float) -> bool:
    """Whether a reader has a part of `whole_bytes` earlier by a delta, at this speed of reading from its holders.

    `delta_bytes` are all bytes that such a reader needs: the delta, and the pieces that have to be read whole.
    """
    whole = whole_bytes / bytes_per_second
    work = whole_bytes * (DIFF_SECONDS_PER_BYTE + PATCH_SECONDS_PER_BYTE)
    return delta_bytes / bytes_per_second + work + ROUND_TRIP_SECONDS < whole


def offer_delta(holder: ReplicaHolder, catalog: Catalog, key: PartKey, packed: PackedPart) -> DeltaOffer | None:
    """Find what changed since the newest visible version of the same layout, and expose it while the part is kept.

    None where that does not pay: all processes that are known to read map the part, no such version is here,
    too much has changed, or the memory's limit leaves no room. `key` is that of the part, which `holder` keeps.
    """
    if holder.maps and not transitions.has_far_readers(catalog, this_host()):
        return None
    _, part, digest = key
    for number in reversed(catalog.visible()):
        shard = catalog.shard(number, part)
        memory = None if shard is None else holder.memory_of((number, part, shard.digest))
        if shard is None or memory is None:
            continue
        if shard.digest == digest:
            return None
        base = Manifest.decode(memory[shard.manifest_at :].numpy().data, shard.manifest_at)
        if base.layout.digest == packed.manifest.layout.digest:
            break
    else:
        return None
    began = time.perf_counter()
    changed = np.flatnonzero(base.sums != packed.manifest.sums)
    pieces = element_pieces(base.layout)
    found = diff(memory, packed.memory, [pieces[at] for at in changed]).among(pieces, changed)
    whole = base.layout.data_bytes
    if not pays(found.nbytes + found.whole_bytes, whole, WIRE_BYTES_PER_SECOND):
        return None
    try:
        handle = holder.attach(key, found, shard.digest)
    except StoreFull as error:
        _log.info("version %d part %d is published without a delta: %s", key[0], part, error)
        return None
    except HoldfastError as error:
        _log.warning("version %d part %d is published without a delta: %s", key[0], part, error)
        return None
    took = time.perf_counter() - began
    _log.debug(
        "version %d part %d: a delta of %d bytes from version %d, in %.3g s", key[0], part, found.nbytes, number, took
    )
    return DeltaOffer(shard.digest, holder.holder.id, handle)


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """Part `part` of `parts`, by the mesh of a state dict, and its `blocks`.

    Without `blocks` (None) it has all tensors, as they are. `shares` is that of `given`.
    """

    flat: FlatState
    part: int
    parts: int
    shares: bool
    blocks: tuple[PartBlock, ...] | None

    @staticmethod
    def of(flat: FlatState) -> PublishedPart:
        """The part of this rank. Raises the errors of `place` and `given`."""
        if flat.plain is not None and flat.locals is flat.tensors and not flat.ties:
            return PublishedPart(flat, 0, 1, False, None)
        placed = {name: place(name, tensor) for name, tensor in flat.published.items()}
        part, parts, blocks, shares = given(placed)
        return PublishedPart(flat, part, parts, shares, tuple(_blocks_to_pack(placed, blocks)))

    def sources(self) -> dict[tuple[str, Box | None], torch.Tensor]:
        """The tensors of the part, by name and box."""
        if self.blocks is None:
            return {(name, None): tensor for name, tensor in self.flat.tensors.items()}
        return {(each.name, each.box): each.tensor for each in self.blocks}

    def pack(self, allocate: Callable[[int], torch.Tensor]) -> PackedPart:
        """Copy the part into memory from `allocate(nbytes)`."""
        if self.blocks is not None:
            return pack(self.blocks, self.flat.skeleton, allocate)
        assert self.flat.plain is not None
        return pack_plain(self.flat.tensors, self.flat.plain, self.flat.skeleton, allocate)


def _blocks_to_pack(placed: Mapping[str, PlacedTensor], gives: Mapping[str, Blocks]) -> Iterator[PartBlock]:
    """The blocks that this rank gives, as views of its local tensors."""
    for name, blocks in gives.items():
        each = placed[name]
        for box, local in blocks:
            if local == whole(each.local.shape):
                view = each.local
            else:
                view = each.local[tuple(slice(low, high) for low, high in local)]
            yield PartBlock(name, view, each.shape, None if box == whole(each.shape) else box)


class Publication:
    """The publication of one part: the only one of `version`, which `holder` keeps as `packed`.

    `keep` is the number of versions to keep. `shares` says whether other parts may have some of its tensors.
    """

    def __init__(
        self,
        client: CatalogClient,
        holder: ReplicaHolder,
        plane: MemoryPlane,
        version: Version,
        packed: PackedPart,
        keep: int,
        shares: bool,
        observe: Callable[[str], None],
    ) -> None:
        self._catalog_client, self._replica_holder, self._plane = client, holder, plane
        self._version, self._packed, self._keep, self._shares, self._observe = version, packed, keep, shares, observe
        (self._shard,) = version.shards
        self._at = version.number, self._shard.part
        self._began = time.monotonic()
        self._compared: set[tuple[int, bytes]] = set()
        """The other parts of the version with which this one was compared; one that is listed later compares itself."""

    def run(self, timeout: float) -> None:
        """Return once enough processes hold the part, or it is published already.

        On any error the part is withdrawn, unless enough processes hold it by then. Raises `StoreTimeout`,
        `StaleEpoch`, `Mismatch`.
        """
        key, publisher = (*self._at, self._packed.digest), self._shard.publisher
        try:
            offered = offer_delta(self._replica_holder, self._catalog_client.newest()[1], key, self._packed)
            self._shard = replace(self._shard, delta=offered)
            at, catalog = self._announce()
            self._observe("announced")
            at, catalog = self._wait(at, catalog, self._began + timeout)
        except BaseException:
            try:
                at, catalog = self._catalog_client.change(lambda now: transitions.withdraw(now, *self._at, publisher))
            except HoldfastError:
                at, catalog = self._catalog_client.newest()
            self._replica_holder.decide(key, at, catalog)
            raise
        if self._replica_holder.holder.leaving:
            try:
                at, catalog = self._catalog_client.change(
                    lambda now: transitions.drop_replica(now, *self._at, publisher)
                )
            except HoldfastError as error:
                _log.info("version %d part %d stays in this process, too: %s", *self._at, error)
        self._replica_holder.decide(key, at, catalog)
        self._observe("published")

    def _announce(self) -> tuple[int, Catalog]:
        deadline = time.monotonic() + COMPARE_SECONDS

        def announced(catalog: Catalog) -> Catalog:
            there = self._replica_holder.rejoined(catalog)
            after = transitions.announce(there, self._version, self._shard, self._keep)
            return catalog if self._to_compare(catalog) else after

        if self._catalog_client.read()[1].version(self._version.number) is not None:
            # the process that began this version may be dead, undetected so far
            self._catalog_client.remove_dead_holders()
        try:
            while True:
                at, catalog = self._catalog_client.change(announced)
                if not (others := self._to_compare(catalog)):
                    return at, catalog
                for shard in others:
                    self._compare(catalog, shard, deadline)
        except Mismatch as error:
            if detail := self._difference():
                raise Mismatch(f"{error}; {detail}") from error
            raise

    def _to_compare(self, catalog: Catalog) -> list[Shard]:
        """The parts that have not been compared with this one. A part that begins a new epoch stays with none."""
        there, fence = catalog.version(self._version.number), self._version.fence
        if not self._shares or there is None or there.visible or (fence is not None and fence != catalog.fence):
            return []
        others = (each for each in there.shards if each.part != self._shard.part)
        return [each for each in others if (each.part, each.digest) not in self._compared]

    def _compare(self, catalog: Catalog, shard: Shard, deadline: float) -> None:
        """Compare with another part. Raises `Mismatch`, naming the tensors and the parts."""
        try:
            other = self._manifest_of(catalog, shard, deadline)
        except HoldfastError as error:
            _log.info("version %d part %d is left to readers to compare: %s", self._version.number, shard.part, error)
        else:
            tensors_of((other.layout, self._packed.manifest.layout))
            check_shared((shard.part, self._shard.part), (other, self._packed.manifest))
        self._compared.add((shard.part, shard.digest))

    def _manifest_of(self, catalog: Catalog, shard: Shard, deadline: float) -> Manifest:
        return PartSource(self._plane, catalog, self._version, shard, deadline, lambda *_: None).manifest()

    def _wait(self, at: int, catalog: Catalog, deadline: float) -> tuple[int, Catalog]:
        while True:
            there = _find(catalog, self._version.number, self._shard)
            if there == "safe":
                return at, catalog
            left = deadline - time.monotonic()
            if there == "gone" and left > 0:
                at, catalog = self._announce()
                continue
            found = self._catalog_client.wait(at, left) if left > 0 else None
            if found is None:
                known = catalog.find(*self._at)
                why = why_unsafe(catalog, *known) if known else f"part {self._at[1]} is not in the catalogue"
                raise StoreTimeout("publish", self._version.number, time.monotonic() - self._began, why)
            at, catalog = found

    def _difference(self) -> str:
        """How the published part of this version differs from ours, as far as it can be read now."""
        _, catalog = self._catalog_client.read()
        known = catalog.find(*self._at)
        if known is None or known[1].digest == self._packed.digest:
            return ""
        try:
            theirs = self._manifest_of(catalog, known[1], time.monotonic() + COMPARE_SECONDS)
            return difference(self._packed.manifest, theirs)
        except HoldfastError:
            return ""


def _find(catalog: Catalog, number: int, shard: Shard) -> str:
    """The state of an announced part: "safe", "waiting" for replicas, or "gone"."""
    if (known := catalog.find(number, shard.part, shard.digest)) is not None:
        return "safe" if known[0].visible or known[1].accepted else "waiting"
    for past in catalog.past:
        if past.number == number and shard.digest in past.digests[shard.part : shard.part + 1]:
            return "safe"
    return "gone"
