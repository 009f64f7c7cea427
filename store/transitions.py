"""All changes of the catalogue, as pure functions.

Each takes a catalogue and returns the next one (an equal one if nothing changes), or raises a typed error. All of them
go through the register's compare-and-set, so the catalogue is always the result of a whole transition, whatever dies.

After every transition `_settle` accepts parts that enough processes keep, makes complete versions visible and drops
superseded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import xxhash
from msgspec.structs import replace

from holdfast.comms.errors import Mismatch, StaleEpoch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import KEPT, Catalog, Holder, Past, Pin, Replica, Shard, Version

REMEMBERED = 16
"""The number of past versions whose numbers the catalogue keeps."""


# -- publishing


def check_fence(catalog: Catalog, fence: int | None) -> None:
    """Raise `StaleEpoch` for a publisher whose epoch is over."""
    if fence is not None and catalog.fence is not None and fence < catalog.fence:
        raise StaleEpoch(
            f"a publisher of epoch {catalog.fence} was here before this one of epoch {fence}: nothing was published; "
            "join the current epoch"
        )


def announce(
    catalog: Catalog,
    number: int,
    shard: Shard,
    *,
    parts: int,
    replicas: int,
    keep: int,
    fence: int | None,
) -> Catalog:
    """Add a part of a version that its publisher holds.

    The same bytes again add a publisher and a replica, or change nothing once the version is visible. Raises
    `StaleEpoch`, and `Mismatch` if the version exists with other parts or bytes, or the publisher's store is closed.
    """
    check_fence(catalog, fence)
    if catalog.holder(shard.publisher) is None:
        raise Mismatch(
            f"the store that publishes version {number} was closed meanwhile, or its process was taken for dead: "
            "nothing was published; open another store"
        )
    for past in catalog.past:
        if past.number == number and catalog.version(number) is None:
            if shard.part < len(past.digests) == parts and past.digests[shard.part] == shard.digest:
                return catalog
            raise Mismatch(f"version {number} was published with other bytes and let go; use a new number")
    if fence is not None:
        stale = [each.number for each in catalog.versions if not each.visible and _older(each.fence, fence)]
        catalog = replace(_without(catalog, stale), fence=fence)
    there = catalog.visible()
    if number not in there and len(there) >= keep and number < there[-keep]:
        kept = ", ".join(map(str, there[-keep:]))
        raise Mismatch(f"version {number} is older than those that are kept ({kept}): it would be let go at once")
    version = catalog.version(number) or Version(number, parts, replicas, fence, False, ())
    if version.parts != parts:
        raise Mismatch(f"version {number} has {version.parts} parts, this publisher says {parts}")
    known = version.shard(shard.part)
    if known is not None and known.digest != shard.digest:
        state = "published" if version.visible else "being published"
        raise Mismatch(
            f"version {number} part {shard.part} is {state} with other bytes: it cannot change; use a new number, or a "
            "later fence for another attempt at a version that is not complete"
        )
    if version.visible:
        return catalog
    if known is None:
        shards = sorted((*version.shards, shard), key=lambda each: each.part)
        return _settle(replace(_with(catalog, replace(version, shards=tuple(shards))), keep=keep))
    if KEPT not in known.publishers and shard.publisher not in known.publishers:
        catalog = _with(catalog, _with_shard(version, replace(known, also=(*known.also, shard.publisher))))
    return replicated(catalog, number, shard.part, shard.digest, shard.replicas[0])


def _older(fence: int | None, than: int) -> bool:
    return fence is not None and fence < than


def replicated(catalog: Catalog, number: int, part: int, digest: bytes, replica: Replica) -> Catalog:
    """Add a holder's replica of a part. Changes nothing if the part is gone or the process has a replica already."""
    version, shard = catalog.version(number), catalog.shard(number, part)
    holder = catalog.holder(replica.holder)
    if version is None or shard is None or holder is None or shard.digest != digest:
        return catalog
    if catalog.safe(version, shard) or holder.peer in catalog.keeping(shard):
        return catalog
    if any(each.holder == holder.id for each in shard.replicas):
        return catalog
    return _settle(_with(catalog, _with_shard(version, replace(shard, replicas=(*shard.replicas, replica)))))


def withdraw(catalog: Catalog, number: int, part: int, publisher: str) -> Catalog:
    """Withdraw a publisher from a part, unless enough processes keep it; the part goes with its last publisher."""
    shard = catalog.shard(number, part)
    return catalog if shard is None or shard.accepted else _without_publisher(catalog, number, part, publisher)


# -- holders


def join(catalog: Catalog, holder: Holder) -> Catalog:
    """Add an open store that keeps replicas."""
    return catalog if catalog.holder(holder.id) else replace(catalog, holders=(*catalog.holders, holder))


def leave(catalog: Catalog, holder_id: str) -> Catalog:
    """Mark a holder as leaving, so that others copy its replicas.

    The parts that it has published stay; those that it is still publishing are withdrawn.
    """
    catalog = _settle_publications(catalog, holder_id)
    holders = tuple(replace(holder, leaving=True) if holder.id == holder_id else holder for holder in catalog.holders)
    return replace(catalog, holders=holders)


def may_depart(catalog: Catalog, holder_id: str) -> bool:
    """Whether a holder can go without loss, or no other holder could take over its replicas."""
    others = [each for each in catalog.holders if each.id != holder_id and not each.leaving]
    return not others or all(
        catalog.keeping(shard)
        for version in catalog.versions
        for shard in version.shards
        if any(replica.holder == holder_id for replica in shard.replicas)
    )


def depart(catalog: Catalog, holder_id: str) -> Catalog:
    """Remove a closed store with its replicas and pins."""
    catalog = _settle_publications(catalog, holder_id)
    return _remove(_unpinned(catalog, lambda each: each.holder == holder_id), {holder_id})


def bury(catalog: Catalog, dead: Collection[Peer]) -> Catalog:
    """Remove dead processes with their replicas, their pins, and their parts of versions that are not visible.

    Another publisher may publish other bytes for those parts.
    """
    catalog = _unpinned(catalog, lambda each: each.peer in dead)
    return _remove(catalog, {holder.id for holder in catalog.holders if holder.peer in dead})


def drop_replica(catalog: Catalog, number: int, part: int, holder_id: str) -> Catalog:
    """Remove a replica that has wrong bytes or is not wanted by its holder, unless it is the only one."""
    version, shard = catalog.version(number), catalog.shard(number, part)
    if version is None or shard is None:
        return catalog
    good = tuple(replica for replica in shard.replicas if replica.holder != holder_id)
    if not good or len(good) == len(shard.replicas):
        return catalog
    return _with(catalog, _with_shard(version, replace(shard, replicas=good)))


def disown(catalog: Catalog, holder_id: str, kept: Collection[Handle]) -> Catalog:
    """Remove a holder's replicas from the catalogue except those with handles in `kept`."""
    dropped = _drop_replicas(catalog, {holder_id}, kept)
    return catalog if dropped == catalog else _lose(dropped)


def missing(catalog: Catalog, holder_id: str) -> Iterator[tuple[Version, Shard, int]]:
    """The parts that a holder could copy, each with its turn: 0 for the first holder to do so, then 1, 2, ...

    All holders compute the same order, which differs from part to part.
    """
    me = catalog.holder(holder_id)
    if me is None or me.leaving:
        return
    for version in catalog.versions:
        for shard in version.shards:
            keeping = catalog.keeping(shard)
            lacking = version.replicas - len(keeping)
            if lacking <= 0 or me.peer in keeping or not shard.replicas:
                continue
            rivals = sorted(
                (xxhash.xxh3_64_intdigest(shard.digest + holder.id.encode()), holder.id)
                for holder in catalog.holders
                if not holder.leaving and holder.peer not in keeping
            )
            position = next(index for index, rival in enumerate(rivals) if rival[1] == holder_id)
            yield version, shard, max(0, position - lacking + 1)


# -- readers and owners


def pin(catalog: Catalog, wanted: int | str, pin_id: str, holder: Holder) -> Catalog:
    """Keep a visible version for the store of `holder`, which need not keep any itself. Raises `NoSuchVersion`."""
    lease = Pin(pin_id, catalog.need(wanted).number, holder.peer, holder.id)
    return catalog if lease in catalog.pins else replace(catalog, pins=(*catalog.pins, lease))


def unpin(catalog: Catalog, pin_id: str) -> Catalog:
    """Release a pin."""
    return _unpinned(catalog, lambda each: each.id == pin_id)


def rollback(catalog: Catalog, number: int) -> Catalog:
    """Make a visible version the latest. Newer ones stay as they are. Raises `NoSuchVersion`."""
    catalog.need(number)
    return catalog if catalog.latest == number else replace(catalog, latest=number)


def delete(catalog: Catalog, number: int) -> Catalog:
    """Remove a visible version and its number. Raises `NoSuchVersion`, `Mismatch` if it is pinned."""
    catalog.need(number)
    pids = sorted(each.peer.pid for each in catalog.pins if each.version == number)
    if pids:
        raise Mismatch(f"version {number} is pinned by process {', '.join(map(str, pids))}; release it first")
    past = tuple(each for each in catalog.past if each.number != number)
    return _without(replace(catalog, past=past), [number])


# -- the effects of a change


def ended(before: Catalog, after: Catalog, holder_id: str) -> Iterator[tuple[str, int]]:
    """The visible versions that a change of this holder removed: "lost" with their last replica, or "retired".

    When the last holder departs, the store ends, and no version counts as lost.
    """
    departed = before.holder(holder_id) is not None and after.holder(holder_id) is None
    if departed and all(holder.leaving for holder in after.holders):
        return
    for number in before.visible():
        if number not in after.visible():
            yield "lost" if number in after.lost else "retired", number


# -- helpers


def _with(catalog: Catalog, version: Version) -> Catalog:
    others = [each for each in catalog.versions if each.number != version.number]
    return replace(catalog, versions=tuple(sorted((*others, version), key=lambda each: each.number)))


def _with_shard(version: Version, shard: Shard) -> Version:
    shards = tuple(shard if each.part == shard.part else each for each in version.shards)
    return replace(version, shards=shards)


def _without(catalog: Catalog, numbers: Collection[int]) -> Catalog:
    if not numbers:
        return catalog
    versions = tuple(each for each in catalog.versions if each.number not in numbers)
    latest = catalog.latest
    if latest in numbers:
        latest = max((each.number for each in versions if each.visible), default=None)
    return replace(catalog, versions=versions, latest=latest)


def _unpinned(catalog: Catalog, gone: Callable[[Pin], bool]) -> Catalog:
    """The catalogue without some pins and without versions that only they kept."""
    pins = tuple(each for each in catalog.pins if not gone(each))
    return catalog if len(pins) == len(catalog.pins) else _settle(replace(catalog, pins=pins))


def _remove(catalog: Catalog, gone: Collection[str]) -> Catalog:
    """The catalogue without some holders, their replicas and their pins."""
    if not gone:
        return catalog
    catalog = _drop_drafts(catalog, gone)
    holders = tuple(holder for holder in catalog.holders if holder.id not in gone)
    catalog = _drop_replicas(replace(catalog, holders=holders), gone)
    return _lose(catalog)


def _lose(catalog: Catalog) -> Catalog:
    """Remove versions that have a part without a replica."""
    without = [each for each in catalog.versions if not all(shard.replicas for shard in each.shards)]
    lost = [each.number for each in without if each.visible]
    past = tuple(each for each in catalog.past if each.number not in lost)
    catalog = replace(catalog, past=past, lost=(*catalog.lost, *lost)[-REMEMBERED:])
    return _settle(_without(catalog, [each.number for each in without]))


def _drop_drafts(catalog: Catalog, publishers: Collection[str]) -> Catalog:
    """Remove the parts of invisible versions that only these stores have published."""
    for version in catalog.versions:
        for shard in version.shards:
            for publisher in publishers:
                catalog = _without_publisher(catalog, version.number, shard.part, publisher)
    return catalog


def _settle_publications(catalog: Catalog, publisher: str) -> Catalog:
    """Remove a closing publisher: its accepted parts stay, others go unless another store publishes them too."""
    for version in catalog.versions:
        for shard in version.shards:
            if publisher not in shard.publishers:
                continue
            if shard.accepted:
                kept = replace(shard, publisher=KEPT, also=())
                catalog = _with(catalog, _with_shard(catalog.version(version.number) or version, kept))
            else:
                catalog = _without_publisher(catalog, version.number, shard.part, publisher)
    return catalog


def _without_publisher(catalog: Catalog, number: int, part: int, publisher: str) -> Catalog:
    """Remove a publisher of a part of an invisible version; the part goes with the last one."""
    version, known = catalog.version(number), catalog.shard(number, part)
    if version is None or version.visible or known is None or publisher not in known.publishers:
        return catalog
    if left := tuple(each for each in known.publishers if each != publisher):
        return _with(catalog, _with_shard(version, replace(known, publisher=left[0], also=left[1:])))
    shards = tuple(each for each in version.shards if each.part != part)
    return _with(catalog, replace(version, shards=shards)) if shards else _without(catalog, [number])


def _drop_replicas(catalog: Catalog, gone: Collection[str], but: Collection[Handle] = ()) -> Catalog:
    """The catalogue without the replicas of some holders, except those with handles in `but`."""
    for version in catalog.versions:
        for shard in version.shards:
            kept = tuple(each for each in shard.replicas if each.holder not in gone or each.handle in but)
            if len(kept) < len(shard.replicas):
                version = _with_shard(version, replace(shard, replicas=kept))
        catalog = _with(catalog, version)
    return catalog


def _settle(catalog: Catalog) -> Catalog:
    for version in catalog.versions:
        for shard in version.shards:
            if not shard.accepted and catalog.safe(version, shard):
                version = _with_shard(version, replace(shard, accepted=True))
                catalog = _with(catalog, version)
        if not version.visible and _complete(catalog, version):
            catalog = _with(catalog, replace(version, visible=True))
            number = version.number
            past = Past(number, tuple(shard.digest for shard in version.shards))
            latest = number if catalog.latest is None else max(number, catalog.latest)
            lost = tuple(each for each in catalog.lost if each != number)
            catalog = replace(catalog, latest=latest, past=(*catalog.past, past), lost=lost)
    pinned = {pin.version for pin in catalog.pins}
    visible = catalog.visible()
    kept = {*visible[-catalog.keep :], *pinned, catalog.latest}
    oldest = visible[-catalog.keep] if len(visible) >= catalog.keep else 0
    superseded = [
        each.number for each in catalog.versions if (each.number not in kept if each.visible else each.number < oldest)
    ]
    return _forget(_without(catalog, superseded))


def _complete(catalog: Catalog, version: Version) -> bool:
    return len(version.shards) == version.parts and all(catalog.safe(version, shard) for shard in version.shards)


def _forget(catalog: Catalog) -> Catalog:
    """Keep the past entries of existing versions, and the newest of those that are gone."""
    there = {version.number for version in catalog.versions}
    gone = [past for past in catalog.past if past.number not in there][-REMEMBERED:]
    past = tuple(past for past in catalog.past if past.number in there or past in gone)
    return catalog if past == catalog.past else replace(catalog, past=past)
