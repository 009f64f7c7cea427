"""Publishes one part of a version: copies, exposes and announces it, and waits until other processes hold it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store.catalog import transitions
from holdfast.store.catalog.client import CatalogClient
from holdfast.store.catalog.failure_domains import why_unsafe
from holdfast.store.catalog.records import Catalog, Shard, Spread
from holdfast.store.data.manifest import difference
from holdfast.store.data.packing import PackedPart
from holdfast.store.errors import StoreTimeout
from holdfast.store.holding.replica_holder import ReplicaHolder
from holdfast.store.publish.delta_offer import offer_delta
from holdfast.store.publish.part_comparison import PartComparison
from holdfast.store.read.part_source import PartSource


@dataclass(frozen=True, slots=True)
class PublishTerms:
    """The part to publish, where to keep it, and how many versions to keep.

    `shares` says whether other parts may have some of its tensors.
    """

    version: int
    part: int
    parts: int
    replicas: int
    keep: int
    fence: int | None
    spread: Spread
    shares: bool


class Publication:
    """The publication of one part."""

    def __init__(
        self,
        client: CatalogClient,
        holder: ReplicaHolder,
        plane: MemoryPlane,
        terms: PublishTerms,
        packed: PackedPart,
        observe: Callable[[str], None],
    ) -> None:
        self._catalog_client, self._replica_holder, self._plane = client, holder, plane
        self._terms, self._packed, self._observe = terms, packed, observe
        self._key = (terms.version, terms.part, packed.digest)
        self._began = time.monotonic()

    def run(self, timeout: float) -> None:
        """Return once enough processes hold the part, or it is published already.

        On any error the part is withdrawn, unless enough processes hold it by then. Raises `StoreTimeout`,
        `StaleEpoch`, `Mismatch`.
        """
        replica = self._replica_holder.keep(self._key, self._packed.memory, self._packed.nbytes)
        publisher = self._replica_holder.holder.id
        shard = Shard(self._terms.part, self._packed.digest, self._packed.manifest_at, publisher, (replica,))
        try:
            offered = offer_delta(self._replica_holder, self._catalog_client.newest()[1], self._key, self._packed)
            shard = replace(shard, delta=offered)
            at, catalog = self._announce(shard)
            self._observe("announced")
            at, catalog = self._wait(shard, at, catalog, self._began + timeout)
        except BaseException:
            self._withdraw(publisher)
            raise
        if self._replica_holder.holder.leaving:
            at, catalog = self._catalog_client.change(
                lambda now: transitions.drop_replica(now, self._terms.version, self._terms.part, publisher)
            )
        self._replica_holder.decide(self._key, at, catalog)
        self._observe("published")

    def _announce(self, shard: Shard) -> tuple[int, Catalog]:
        terms = self._terms
        comparison = PartComparison(self._plane, terms.version, terms.part, terms.fence, self._packed.manifest)

        def is_compared(catalog: Catalog) -> bool:
            return not terms.shares or not comparison.left(catalog)

        def announced(catalog: Catalog) -> Catalog:
            after = transitions.announce(
                self._replica_holder.rejoined(catalog),
                terms.version,
                shard,
                parts=terms.parts,
                replicas=terms.replicas,
                keep=terms.keep,
                fence=terms.fence,
                spread=terms.spread,
            )
            return after if is_compared(catalog) else catalog

        if self._catalog_client.read()[1].version(terms.version) is not None:
            # the process that began this version may be dead, undetected so far
            self._catalog_client.remove_dead_holders()
        try:
            while True:
                at, catalog = self._catalog_client.change(announced)
                if is_compared(catalog):
                    return at, catalog
                comparison.compare(catalog)
        except Mismatch as error:
            if detail := self._difference():
                raise Mismatch(f"{error}; {detail}") from error
            raise

    def _wait(self, shard: Shard, at: int, catalog: Catalog, deadline: float) -> tuple[int, Catalog]:
        while True:
            there = _find(catalog, self._terms.version, shard)
            if there == "safe":
                return at, catalog
            if there == "gone":
                at, catalog = self._announce(shard)
                continue
            left = deadline - time.monotonic()
            found = self._catalog_client.wait(at, left) if left > 0 else None
            if found is None:
                waited = time.monotonic() - self._began
                raise StoreTimeout("publish", self._terms.version, waited, self._lacking(catalog, shard))
            at, catalog = found

    def _lacking(self, catalog: Catalog, shard: Shard) -> str:
        version, known = catalog.version(self._terms.version), catalog.shard(self._terms.version, shard.part)
        if version is None or known is None:
            return f"part {shard.part} is not in the catalogue"
        return why_unsafe(catalog, version, known)

    def _withdraw(self, publisher: str) -> None:
        try:
            at, catalog = self._catalog_client.change(
                lambda now: transitions.withdraw(now, self._terms.version, self._terms.part, publisher)
            )
        except HoldfastError:
            at, catalog = self._catalog_client.newest()
        self._replica_holder.decide(self._key, at, catalog)

    def _difference(self) -> str:
        """How the published part of this version differs from ours, as far as it can be read now."""
        _, catalog = self._catalog_client.read()
        version = catalog.version(self._terms.version)
        shard = catalog.shard(self._terms.version, self._terms.part)
        if version is None or shard is None or shard.digest == self._packed.digest:
            return ""
        try:
            reader = PartSource(self._plane, catalog, version, shard, time.monotonic() + 1.0, lambda *_: None)
            return difference(self._packed.manifest, reader.manifest())
        except HoldfastError:
            return ""


def _find(catalog: Catalog, number: int, shard: Shard) -> str:
    """The state of an announced part: "safe", "waiting" for replicas, or "gone"."""
    version, known = catalog.version(number), catalog.shard(number, shard.part)
    if version is not None and known is not None and known.digest == shard.digest:
        return "safe" if version.visible or known.accepted else "waiting"
    for past in catalog.past:
        if past.number == number and shard.digest in past.digests[shard.part : shard.part + 1]:
            return "safe"
    return "gone"
