"""What every transition shares: editing versions and parts, and the rules that hold after each change.

`settle` accepts parts that are safe, makes complete versions visible, drops superseded ones, and assigns casts to
holders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.store.catalog.part_casts import settled_casts
from holdfast.store.catalog.records import KEPT, Catalog, DiskCopy, Past, Pin, SwitchRecord

MOST_UNFINISHED = 2
"""The most versions that wait for the disk, for each retainer: all of them stay in memory until they are written."""


def with_due_copy(catalog: Catalog, number: int) -> Catalog:
    """Note that a visible version must go to disk, if it is due and the retainers keep up.

    If they do not, the version is left out, and the next one is due.
    """
    unfinished = sum(not copy.done for copy in catalog.disk)
    if not catalog.retainers or unfinished >= MOST_UNFINISHED * len(catalog.retainers):
        return catalog
    newest = max((copy.version for copy in catalog.disk), default=None)
    if newest is not None and number < newest + min(retainer.every for retainer in catalog.retainers):
        return catalog
    return replace(catalog, disk=(*catalog.disk, DiskCopy(number)))


def kept_for_disk(catalog: Catalog) -> frozenset[int]:
    """The versions that stay until they are on disk. Without a retainer, none does."""
    return frozenset(copy.version for copy in catalog.disk if not copy.done) if catalog.retainers else frozenset()


REMEMBERED = 16
"""The number of past versions that the catalogue keeps the numbers of."""


def kept_for_readers(catalog: Catalog) -> frozenset[int]:
    """The versions that must stay for readers and switches."""
    versions = {each.version for each in live_switches(catalog)}
    for reader in catalog.readers:
        versions.update(reader.pinned)
    return frozenset(versions)


def live_switches(catalog: Catalog) -> tuple[SwitchRecord, ...]:
    """The undecided switch, and the committed ones that a reader, here or yet to come, must carry out."""
    serials = {each.serial for each in catalog.switches if each.preparing}
    serials.update(each.must for each in catalog.readers)
    serials.add(max((each.serial for each in catalog.switches if each.state == "committed"), default=0))
    return tuple(each for each in catalog.switches if each.serial in serials)


def without_versions(catalog: Catalog, numbers: Collection[int]) -> Catalog:
    if not numbers:
        return catalog
    versions = tuple(each for each in catalog.versions if each.number not in numbers)
    latest = catalog.latest
    if latest in numbers:
        latest = max((each.number for each in versions if each.visible), default=None)
    readers = tuple(
        replace(each, ready=tuple(number for number in each.ready if number not in numbers)) for each in catalog.readers
    )
    return replace(catalog, versions=versions, latest=latest, readers=readers)


def unpinned(catalog: Catalog, gone: Callable[[Pin], bool]) -> Catalog:
    """The catalogue without some pins and without versions that only they kept."""
    pins = tuple(each for each in catalog.pins if not gone(each))
    return catalog if len(pins) == len(catalog.pins) else settle(replace(catalog, pins=pins))


def remove_holders(catalog: Catalog, gone: Collection[str]) -> Catalog:
    """The catalogue without some holders, their replicas, and the parts that they were still publishing."""
    if not gone:
        return catalog
    for holder in gone:
        catalog = end_publications(catalog, holder)
    holders = tuple(holder for holder in catalog.holders if holder.id not in gone)
    return remove_lost(drop_replicas(replace(catalog, holders=holders), gone))


def remove_lost(catalog: Catalog) -> Catalog:
    """Remove visible versions that have a part without a replica, and such parts of the others."""
    lost, empty = [], []
    for version in catalog.versions:
        left = tuple(shard for shard in version.shards if shard.replicas)
        if len(left) == len(version.shards):
            continue
        if version.visible:
            lost.append(version.number)
        elif left:
            catalog = catalog.with_version(replace(version, shards=left))
        else:
            empty.append(version.number)
    past = tuple(each for each in catalog.past if each.number not in lost)
    catalog = replace(catalog, past=past, lost=(*catalog.lost, *lost)[-REMEMBERED:])
    return settle(without_versions(catalog, [*lost, *empty]))


def end_publications(catalog: Catalog, publisher: str) -> Catalog:
    """Remove a store that has closed or died from the parts it has published.

    Accepted parts stay; others go unless another store publishes them too.
    """
    for version in catalog.versions:
        for shard in version.shards:
            if publisher not in shard.publishers:
                continue
            if shard.accepted:
                kept = replace(shard, publisher=KEPT, also=())
                catalog = catalog.with_version((catalog.version(version.number) or version).with_shard(kept))
            else:
                catalog = without_publisher(catalog, version.number, shard.part, publisher)
    return catalog


def without_publisher(catalog: Catalog, number: int, part: int, publisher: str) -> Catalog:
    """Remove a publisher of a part of an invisible version; the part goes with the last one."""
    if (found := catalog.find(number, part)) is None:
        return catalog
    version, known = found
    if version.visible or publisher not in known.publishers:
        return catalog
    if left := tuple(each for each in known.publishers if each != publisher):
        return catalog.with_version(version.with_shard(replace(known, publisher=left[0], also=left[1:])))
    shards = tuple(each for each in version.shards if each.part != part)
    return catalog.with_version(replace(version, shards=shards)) if shards else without_versions(catalog, [number])


def drop_replicas(catalog: Catalog, gone: Collection[str], but: Collection[Handle] = ()) -> Catalog:
    """The catalogue without the replicas of some holders, except those with handles in `but`."""
    for version in catalog.versions:
        for shard in version.shards:
            kept = tuple(each for each in shard.replicas if each.holder not in gone or each.handle in but)
            if len(kept) < len(shard.replicas):
                version = version.with_shard(replace(shard, replicas=kept))
        catalog = catalog.with_version(version)
    return catalog


def settle(catalog: Catalog) -> Catalog:
    """The catalogue after everything that follows from a change."""
    for version in catalog.versions:
        for shard in version.shards:
            if not shard.accepted and catalog.safe(version, shard):
                version = version.with_shard(replace(shard, accepted=True))
                catalog = catalog.with_version(version)
        if not version.visible and sum(shard.accepted for shard in version.shards) == version.parts:
            catalog = catalog.with_version(replace(version, visible=True))
            number = version.number
            past = Past(number, tuple(shard.digest for shard in version.shards))
            latest = number if catalog.latest is None else max(number, catalog.latest)
            lost = tuple(each for each in catalog.lost if each != number)
            catalog = with_due_copy(replace(catalog, latest=latest, past=(*catalog.past, past), lost=lost), number)
    pinned = {pin.version for pin in catalog.pins}
    visible = catalog.visible()
    kept = {*visible[-catalog.keep :], *pinned, *kept_for_readers(catalog), *kept_for_disk(catalog), catalog.latest}
    oldest = visible[-catalog.keep] if len(visible) >= catalog.keep else 0
    superseded = [
        each.number for each in catalog.versions if (each.number not in kept if each.visible else each.number < oldest)
    ]
    return _settle_casts(_without_idle_away(_forget(without_versions(catalog, superseded))))


def _without_idle_away(catalog: Catalog) -> Catalog:
    """Remove the replicas of hosts that are away from parts that are safe without them, then stores that have none."""
    if not catalog.away:
        return catalog
    needed: set[str] = set()
    for version in catalog.versions:
        for shard in version.shards:
            if catalog.safe(version, shard):
                kept = tuple(each for each in shard.replicas if not catalog.is_away(each.holder))
                shard = replace(shard, replicas=kept)
                version = version.with_shard(shard)
            needed.update(each.holder for each in shard.replicas)
        catalog = catalog.with_version(version)
    holders = tuple(each for each in catalog.holders if each.peer.host not in catalog.away or each.id in needed)
    catalog = replace(catalog, holders=holders)
    there = {peer.host for peer in catalog.peers()}
    return replace(catalog, away=tuple(host for host in catalog.away if host in there))


def _settle_casts(catalog: Catalog) -> Catalog:
    for version in catalog.versions:
        for shard in version.shards:
            if shard.casts and (settled := settled_casts(catalog, shard)) != shard:
                version = version.with_shard(settled)
                catalog = catalog.with_version(version)
    return catalog


def _forget(catalog: Catalog) -> Catalog:
    """Keep the past entries of existing versions, and the newest of those that are gone."""
    there = {version.number for version in catalog.versions}
    gone = [past for past in catalog.past if past.number not in there][-REMEMBERED:]
    past = tuple(past for past in catalog.past if past.number in there or past in gone)
    return catalog if past == catalog.past else replace(catalog, past=past)
