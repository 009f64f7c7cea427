"""Catalogues for tests: stores that have joined, and versions of one part that they announce and copy."""

from __future__ import annotations

from holdfast.comms.memory_plane import Handle
from holdfast.store.catalog import transitions
from holdfast.store.catalog.records import Catalog, Holder, Replica, Shard, Spread, Version

DIGEST = b"x" * 16


def joined(*holders: Holder) -> Catalog:
    """The catalogue that these stores have joined."""
    catalog = Catalog()
    for holder in holders:
        catalog = transitions.join(catalog, holder)
    return catalog


def replica(holder: str) -> Replica:
    return Replica(holder, Handle("shm", holder.encode(), 100))


def shard(*holders: str, digest: bytes = DIGEST) -> Shard:
    """The only part of a version, which the first of these holders has published."""
    return Shard(0, digest, 50, holders[0], tuple(map(replica, holders)))


def announced(
    catalog: Catalog,
    holder: str,
    number: int = 1,
    *,
    replicas: int = 1,
    spread: Spread = "auto",
    digest: bytes = DIGEST,
) -> Catalog:
    """The catalogue after a store has announced a version; nothing is copied yet."""
    version = Version(number, 1, replicas, None, False, (), spread)
    return transitions.announce(catalog, version, shard(holder, digest=digest), 2)


def copied(catalog: Catalog, *holders: str) -> Catalog:
    """The catalogue after stores have copied version 1."""
    for holder in holders:
        catalog = transitions.replicated(catalog, 1, 0, DIGEST, replica(holder))
    return catalog
