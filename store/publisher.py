"""Publishes one part of a version: copies, exposes and announces it, and waits until other processes hold it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.comms.errors import HoldfastError, Mismatch
from holdfast.comms.memory_plane import MemoryPlane
from holdfast.store import transitions
from holdfast.store.book import Book
from holdfast.store.catalog import Catalog, Shard
from holdfast.store.errors import StoreTimeout
from holdfast.store.keeper import Keeper
from holdfast.store.layout import PackedPart, difference
from holdfast.store.reader import PartReader


@dataclass(frozen=True, slots=True)
class Terms:
    """The part to publish, and how many processes and versions to keep."""

    version: int
    part: int
    parts: int
    replicas: int
    keep: int
    fence: int | None


class Publication:
    """The publication of one part."""

    def __init__(
        self,
        book: Book,
        keeper: Keeper,
        plane: MemoryPlane,
        terms: Terms,
        packed: PackedPart,
        observe: Callable[[str], None],
    ) -> None:
        self._book, self._keeper, self._plane = book, keeper, plane
        self._terms, self._packed, self._observe = terms, packed, observe
        self._key = (terms.version, terms.part, packed.digest)
        self._began = time.monotonic()

    def run(self, timeout: float) -> None:
        """Return once enough processes hold the part, or it is published already.

        On any error the part is withdrawn, unless enough processes hold it by then. Raises `StoreTimeout`,
        `StaleEpoch`, `Mismatch`.
        """
        replica = self._keeper.keep(self._key, self._packed.memory, self._packed.nbytes)
        publisher = self._keeper.holder.id
        shard = Shard(self._terms.part, self._packed.digest, self._packed.manifest_at, publisher, (replica,))
        try:
            at, catalog = self._announce(shard)
            self._observe("announced")
            at, catalog = self._wait(shard, at, catalog, self._began + timeout)
        except BaseException:
            self._withdraw(publisher)
            raise
        if self._keeper.holder.leaving:
            at, catalog = self._book.change(
                lambda now: transitions.drop_replica(now, self._terms.version, self._terms.part, publisher)
            )
        self._keeper.decide(self._key, at, catalog)
        self._observe("published")

    def _announce(self, shard: Shard) -> tuple[int, Catalog]:
        terms = self._terms
        if self._book.read()[1].version(terms.version) is not None:
            self._book.bury_dead()  # the process that began this version may be dead, undetected so far
        try:
            return self._book.change(
                lambda now: transitions.announce(
                    now,
                    terms.version,
                    shard,
                    parts=terms.parts,
                    replicas=terms.replicas,
                    keep=terms.keep,
                    fence=terms.fence,
                )
            )
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
            found = self._book.wait(at, left) if left > 0 else None
            if found is None:
                waited = time.monotonic() - self._began
                raise StoreTimeout("publish", self._terms.version, waited, self._lacking(catalog, shard))
            at, catalog = found

    def _lacking(self, catalog: Catalog, shard: Shard) -> str:
        known = catalog.shard(self._terms.version, shard.part)
        count = len(catalog.keeping(known)) if known else 0
        pids = sorted({each.pid for each in catalog.holders if not each.leaving})
        return (
            f"{count} of {self._terms.replicas} processes keep part {shard.part}; this store is open for holding in "
            f"{len(pids)} (pid {', '.join(map(str, pids)) or 'none'}); open it in more, or ask for fewer replicas"
        )

    def _withdraw(self, publisher: str) -> None:
        try:
            at, catalog = self._book.change(
                lambda now: transitions.withdraw(now, self._terms.version, self._terms.part, publisher)
            )
        except HoldfastError:
            at, catalog = self._book.newest()
        self._keeper.decide(self._key, at, catalog)

    def _difference(self) -> str:
        """How the published part of this version differs from ours, as far as it can be read now."""
        _, catalog = self._book.read()
        version = catalog.version(self._terms.version)
        shard = catalog.shard(self._terms.version, self._terms.part)
        if version is None or shard is None or shard.digest == self._packed.digest:
            return ""
        try:
            reader = PartReader(self._plane, catalog, version, shard, time.monotonic() + 1.0, lambda *_: None)
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
