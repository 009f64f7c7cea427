"""All changes of the catalogue, as pure functions.

Each takes a catalogue and returns the next one (an equal one if nothing changes), or raises a typed error. All of them
go through the register's compare-and-set, so the catalogue is always the result of a whole transition, whatever dies.

After every transition `settle` accepts parts that have their replicas, makes complete versions visible and drops
superseded ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec.structs import replace

from holdfast.comms.errors import Mismatch, StaleEpoch
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.disk_copies import remove_dead_retainers
from holdfast.store.catalog.failure_domains import candidates, helps, without_surplus
from holdfast.store.catalog.fleet import decide_switch, remove_dead_readers, remove_readers_of
from holdfast.store.catalog.records import KEPT, Catalog, Holder, Pin, Replica, Shard, Version
from holdfast.store.catalog.settling import (
    drop_replicas,
    end_publications,
    live_switches,
    remove_holders,
    remove_lost,
    settle,
    unpinned,
    without_publisher,
    without_versions,
)

# -- publishing


def check_fence(catalog: Catalog, fence: int | None) -> None:
    """Raise `StaleEpoch` for a publisher of an epoch that is over."""
    if fence is not None and catalog.fence is not None and fence < catalog.fence:
        raise StaleEpoch(
            f"a publisher of epoch {catalog.fence} was here before this one of epoch {fence}: nothing was published; "
            "join the current epoch"
        )


def announce(catalog: Catalog, draft: Version, shard: Shard, keep: int) -> Catalog:
    """Add a part of a version that its publisher holds; `draft` is the version as the publisher wants it.

    The same bytes again add a publisher and a replica, or change nothing once the version is visible. A `fence` later
    than all before drops every version that is not visible yet. Raises `StaleEpoch`, and `Mismatch` if the version
    exists with other parts or bytes, or the publisher's store is closed.
    """
    number, parts, fence = draft.number, draft.parts, draft.fence
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
    if fence is not None and fence != catalog.fence:
        begun = [each.number for each in catalog.versions if not each.visible]
        catalog = replace(without_versions(catalog, begun), fence=fence)
    there = catalog.visible()
    if number not in there and len(there) >= keep and number < there[-keep]:
        kept = ", ".join(map(str, there[-keep:]))
        raise Mismatch(f"version {number} is older than those that are kept ({kept}): it would be let go at once")
    version = catalog.version(number) or replace(draft, shards=())
    if version.parts != parts:
        again = "" if version.visible else f"; {_anew(catalog)}"
        raise Mismatch(f"version {number} has {version.parts} parts, this publisher says {parts}{again}")
    known = version.shard(shard.part)
    if known is not None and known.digest != shard.digest:
        raise Mismatch(f"version {number} part {shard.part} is {_state(catalog, version, known)}")
    if version.visible:
        return catalog
    if known is None:
        shards = sorted((*version.shards, shard), key=lambda each: each.part)
        return settle(replace(catalog.with_version(replace(version, shards=tuple(shards))), keep=keep))
    if KEPT not in known.publishers and shard.publisher not in known.publishers:
        catalog = catalog.with_version(version.with_shard(replace(known, also=(*known.also, shard.publisher))))
    return replicated(catalog, number, shard.part, shard.digest, shard.replicas[0])


def _state(catalog: Catalog, version: Version, shard: Shard) -> str:
    """The state of a part that has other bytes, and what its next publisher can do."""
    if version.visible:
        return "published with other bytes: it cannot change; use a new number"
    if shard.accepted:
        gone = ", by a publisher that is gone" if shard.publisher == KEPT else ""
        return f"published with other bytes{gone}; other parts are missing: publish the same bytes, {_anew(catalog)}"
    pids = sorted({holder.pid for each in shard.publishers if (holder := catalog.holder(each))})
    return f"being published with other bytes by process {', '.join(map(str, pids))}: {_anew(catalog)}"


def _anew(catalog: Catalog) -> str:
    later = "a fence" if catalog.fence is None else f"a later fence than {catalog.fence}"
    return f"use a new number, or {later}, which begins anew every version that is not complete"


def replicated(catalog: Catalog, number: int, part: int, digest: bytes, replica: Replica) -> Catalog:
    """Add a holder's replica of a part. Changes nothing if the part is gone or the process has a replica already."""
    found, holder = catalog.find(number, part, digest), catalog.holder(replica.holder)
    if found is None or holder is None:
        return catalog
    version, shard = found
    if catalog.safe(version, shard) or any(each.holder == holder.id for each in shard.replicas):
        return catalog
    if catalog.stays(holder) and not helps(catalog, version, shard, holder):
        return catalog
    shard = replace(shard, replicas=(*shard.replicas, replica))
    return settle(catalog.with_version(version.with_shard(without_surplus(catalog, version, shard))))


def withdraw(catalog: Catalog, number: int, part: int, publisher: str) -> Catalog:
    """Withdraw a publisher from a part, unless it is accepted; the part goes with its last publisher."""
    shard = catalog.shard(number, part)
    return catalog if shard is None or shard.accepted else without_publisher(catalog, number, part, publisher)


# -- holders


def join(catalog: Catalog, holder: Holder) -> Catalog:
    """Add an open store that keeps replicas. Its host is not away, as it reaches the register."""
    if catalog.holder(holder.id):
        return catalog
    return host_back(replace(catalog, holders=(*catalog.holders, holder)), holder.peer.host)


def note_slow(catalog: Catalog, holder_id: str, why: str) -> Catalog:
    """Note why a holder's copies from devices are slow."""
    holders = (replace(holder, slow=why) if holder.id == holder_id else holder for holder in catalog.holders)
    return replace(catalog, holders=tuple(holders))


def leave(catalog: Catalog, holder_id: str) -> Catalog:
    """Mark a holder as leaving, so that others copy its replicas.

    The parts that it has published stay; those that it is still publishing are withdrawn.
    """
    catalog = end_publications(catalog, holder_id)
    holders = tuple(replace(holder, leaving=True) if holder.id == holder_id else holder for holder in catalog.holders)
    return settle(replace(catalog, holders=holders))


def may_depart(catalog: Catalog, holder_id: str) -> bool:
    """Whether a leaving holder can go: its parts are safe without it, or no other holder could make them safer."""
    return not any(
        candidates(catalog, version, shard)
        for version in catalog.versions
        for shard in version.shards
        if any(replica.holder == holder_id for replica in shard.replicas)
    )


def depart(catalog: Catalog, holder_id: str) -> Catalog:
    """Remove a closed store with its replicas, pins and readers."""
    catalog = remove_readers_of(end_publications(catalog, holder_id), holder_id)
    return remove_holders(unpinned(catalog, lambda each: each.holder == holder_id), {holder_id})


def remove_dead_holders(catalog: Catalog, dead: Collection[Peer]) -> Catalog:
    """Remove dead processes with their replicas, pins and readers, and the parts that they were still publishing.

    Their accepted parts stay as long as a replica is left; any publisher may bring the parts that are missing.
    """
    catalog = remove_dead_retainers(unpinned(catalog, lambda each: each.peer in dead), dead)
    catalog = remove_holders(catalog, {holder.id for holder in catalog.holders if holder.peer in dead})
    return remove_dead_readers(catalog, dead)


def hosts_away(catalog: Catalog, hosts: Collection[str]) -> Catalog:
    """Mark hosts as away that do not beat any more: their replicas do not count until they are back.

    What their stores are still publishing goes. Their replicas and idle stores go, too, once the parts are safe without
    them: a part stays that only hosts have which are away. Their readers are counted out of the undecided switch.
    """
    new = sorted(catalog.hosts().intersection(hosts))
    if not new:
        return catalog
    for holder in catalog.holders:
        if holder.peer.host in new:
            catalog = end_publications(catalog, holder.id)
    return decide_switch(settle(replace(catalog, away=(*catalog.away, *new))))


def host_back(catalog: Catalog, host: str) -> Catalog:
    """Count the replicas of a host again."""
    if host not in catalog.away:
        return catalog
    return settle(replace(catalog, away=tuple(each for each in catalog.away if each != host)))


def drop_replica(catalog: Catalog, number: int, part: int, holder_id: str) -> Catalog:
    """Remove a replica that is not the only one: its bytes are wrong, or its holder does not want it."""
    if (found := catalog.find(number, part)) is None:
        return catalog
    version, shard = found
    good = tuple(replica for replica in shard.replicas if replica.holder != holder_id)
    if not good or len(good) == len(shard.replicas):
        return catalog
    return settle(catalog.with_version(version.with_shard(replace(shard, replicas=good))))


def retract(catalog: Catalog, holder_id: str, kept: Collection[Handle]) -> Catalog:
    """Remove a holder's replicas from the catalogue except those with handles in `kept`."""
    dropped = drop_replicas(catalog, {holder_id}, kept)
    return catalog if dropped == catalog else remove_lost(dropped)


def missing(catalog: Catalog, holder_id: str) -> Iterator[tuple[Version, Shard, int]]:
    """The parts that a holder could copy, each with its turn.

    Turn 0 is for the first holders to copy the part; the others follow in turns 1, 2, ...
    """
    me = catalog.holder(holder_id)
    if me is None or not catalog.stays(me):
        return
    for version in catalog.versions:
        for shard in version.shards:
            for holder, turn in candidates(catalog, version, shard):
                if holder.id == holder_id:
                    yield version, shard, turn


# -- readers and owners


def pin(catalog: Catalog, wanted: int | str, pin_id: str, holder: Holder) -> Catalog:
    """Keep a visible version for the store of `holder`, which need not keep any itself. Raises `NoSuchVersion`."""
    lease = Pin(pin_id, catalog.need(wanted).number, holder.peer, holder.id)
    return catalog if lease in catalog.pins else replace(catalog, pins=(*catalog.pins, lease))


def unpin(catalog: Catalog, pin_id: str) -> Catalog:
    """Release a pin."""
    return unpinned(catalog, lambda each: each.id == pin_id)


def rollback(catalog: Catalog, number: int) -> Catalog:
    """Make a visible version the latest. Newer ones stay as they are. Raises `NoSuchVersion`."""
    catalog.need(number)
    return catalog if catalog.latest == number else settle(replace(catalog, latest=number))


def delete(catalog: Catalog, number: int) -> Catalog:
    """Remove a visible version and its number. Raises `NoSuchVersion`, `Mismatch` if it is pinned."""
    catalog.need(number)
    pids = sorted(each.peer.pid for each in catalog.pins if each.version == number)
    if pids:
        raise Mismatch(f"version {number} is pinned by process {', '.join(map(str, pids))}; release it first")
    if why := _keepers(catalog, number):
        raise Mismatch(f"version {number} is kept for {', '.join(why)}; let them take another version first")
    past = tuple(each for each in catalog.past if each.number != number)
    return settle(without_versions(replace(catalog, past=past), [number]))


def _keepers(catalog: Catalog, number: int) -> list[str]:
    """What keeps a version for readers, in words."""
    found = [f"reader {each.id!r} (process {each.pid})" for each in catalog.readers if number in each.pinned]
    return found + [f"{each.state} switch {each.serial}" for each in live_switches(catalog) if each.version == number]


# -- reads over a wire
#
# Publishers make deltas while processes read parts without mapping them. Holders, followers and pins are in the
# catalogue with their processes; a process that only reads notes that there. It may be gone without a word, so a note
# counts for the next versions only, and is renewed.

RENEWED_AFTER, COUNTS_FOR = 8, 16
"""Versions after which a note is renewed, and no longer counts."""


def note_far_read(catalog: Catalog, version: int) -> Catalog:
    """Note that a process has read a version without mapping it. Changes nothing if a note of late is there."""
    known, newest = catalog.far_read, max(catalog.visible(), default=0)
    late = known is None or known > newest or version >= known + RENEWED_AFTER
    return replace(catalog, far_read=version) if late else catalog


def has_far_readers(catalog: Catalog, host: str) -> bool:
    """Whether processes read the newest versions from `host` without mapping them, or may."""
    far, newest = catalog.far_read, max(catalog.visible(), default=0)
    noted = far is not None and 0 <= newest - far < COUNTS_FOR
    return noted or any(peer.host != host for peer in catalog.peers())


# -- the effects of a change


def moved(before: Catalog, after: Catalog) -> Iterator[tuple[str, str]]:
    """The hosts that a change marked as away ("host_away"), or no longer does ("host_back")."""
    yield from (("host_away", host) for host in after.away if host not in before.away)
    yield from (("host_back", host) for host in before.away if host not in after.away and host in after.hosts())


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
