"""Assigns sources to readers of other hosts, so that readers serve readers. Pure functions.

Readers of one host need one copy of a part, which they map. A reader first asks for its copy (`request_copy`), is
assigned a source, reads, and lists the copy (`announce_copy`). No source serves more than `AT_ONCE` assigned readers at
a time, and each replica serves one of the first readers; the others read from copies. So a holder sends a part once,
however many readers there are.

Thousands of readers do not change one register cell: their hosts form groups (`ReaderGroup`), each with a cell. The
first reader of a group leads it. It asks in the group of leaders, where the seeds are the part's replicas; the others
are served within their group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import msgspec
import xxhash
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.records import Catalog, CellRecord, Holder, PartKey, Shard

AT_ONCE = 1
"""The number of readers that one source serves at a time: with more, all of them finish later, and serve later."""
GROUPS = 32
LEADERS = GROUPS
"""The number of the group of leaders."""
LEAD = "leaders"
"""The source of a leader in its own group: it reads from what the group of leaders assigns."""
COPIES = 1024
"""The limit of a part's copies in a group. Readers beyond it read without an assigned source."""
FEW_HOSTS = 4
"""With one follower on each of at most so many hosts without a replica, each reads from replicas, straight into its
tensors."""


class ServingCopy(msgspec.Struct, frozen=True, array_like=True):
    """A whole part in the memory of the store `reader` of process `peer`, which serves other readers.

    While it is being read, `handle` is None, and `source` is the store that it is read from ("" until there is one), or
    `LEAD`. It does not count for safety.
    """

    reader: str
    peer: Peer
    source: str = ""
    handle: Handle | None = None


class GroupPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a version, its copies in the group, and the sources of the first of them."""

    key: PartKey
    seeds: tuple[str, ...] = ()
    copies: tuple[ServingCopy, ...] = ()


class ReaderGroup(CellRecord, frozen=True, array_like=True):
    """The parts that readers of a group have or want."""

    what: ClassVar[str] = "a group of readers"
    parts: tuple[GroupPart, ...] = ()

    def part(self, key: PartKey) -> GroupPart:
        return next((each for each in self.parts if each.key == key), GroupPart(key))


def group_of(host: str) -> int:
    """The number of the group to which a host belongs."""
    return xxhash.xxh3_64_intdigest(host.encode()) % GROUPS


def worthwhile(catalog: Catalog, shard: Shard, host: str) -> bool:
    """Whether the readers of a host should share a copy.

    They should if the host has no replica, and several readers follow there, or on many such hosts.
    """
    replicas = {holder.peer.host for each in shard.replicas if (holder := catalog.holder(each.holder))}
    following = Counter(each.peer.host for each in catalog.readers)
    return host not in replicas and (following[host] > 1 or len(following.keys() - replicas) > FEW_HOSTS)


def request_copy(group: ReaderGroup, key: PartKey, reader: Holder, seeds: Sequence[str] = (LEAD,)) -> ReaderGroup:
    """Ask for a source from which a reader copies a part for its host. `seeds` are sources for the first copies.

    Changes nothing if its host has the part or asks for it already, or the limit is reached. Copies of other versions
    go, unless readers wait for them.
    """
    copies = group.part(key).copies
    if len(copies) >= COPIES or any(each.peer.host == reader.peer.host for each in copies):
        return group
    asked = assigned(GroupPart(key, tuple(seeds), (*copies, ServingCopy(reader.id, reader.peer))))
    awaited = (each for each in group.parts if each.key[0] == key[0] or any(one.handle is None for one in each.copies))
    return replace(group, parts=(*(each for each in awaited if each.key != key), asked))


def announce_copy(group: ReaderGroup, key: PartKey, reader: str, handle: Handle) -> ReaderGroup:
    """List a reader's copy, which is complete and exposed, as a source. Changes nothing unless it was asked for."""

    def announced(copy: ServingCopy) -> ServingCopy:
        return replace(copy, source="", handle=handle) if copy.reader == reader else copy

    return _changed(group, lambda part: tuple(map(announced, part.copies)) if part.key == key else part.copies)


def withdraw_copy(group: ReaderGroup, key: PartKey, reader: str) -> ReaderGroup:
    """Remove a copy, or the request for it: the reader gave up, or its copy cannot be read. Its readers wait anew."""
    return _without(group, lambda part, copy: part.key == key and copy.reader == reader)


def remove_readers(group: ReaderGroup, gone: Collection[Peer | str]) -> ReaderGroup:
    """Remove stores that have closed (by id), or died with their processes, and their copies."""
    return _without(group, lambda _, copy: copy.reader in gone or copy.peer in gone)


def _without(group: ReaderGroup, gone: Callable[[GroupPart, ServingCopy], bool]) -> ReaderGroup:
    return _changed(group, lambda part: tuple(each for each in part.copies if not gone(part, each)))


def _changed(group: ReaderGroup, copies: Callable[[GroupPart], Sequence[ServingCopy]]) -> ReaderGroup:
    parts = (assigned(replace(each, copies=tuple(copies(each)))) for each in group.parts)
    after = replace(group, parts=tuple(each for each in parts if each.copies))
    return group if after == group else after


def assigned(part: GroupPart) -> GroupPart:
    """The part after each reader that waits has been assigned a source, as far as sources are free.

    A reader waits again if its source is gone. Readers are served in order, by the source with the fewest readers,
    rather by a copy than by a seed.
    """
    complete = [each.reader for each in part.copies if each.handle is not None]
    sources = {*part.seeds, *complete}
    found = [each if each.handle or each.source in sources else replace(each, source="") for each in part.copies]
    load = Counter(each.source for each in found)
    for index, copy in enumerate(found):
        if copy.handle is not None or copy.source:
            continue
        begun = sum(each.handle is not None or each.source != "" for each in found)
        able = [each for each in (*complete, *(part.seeds if begun < len(part.seeds) else ())) if load[each] < AT_ONCE]
        if not able:
            break
        source = min(able, key=lambda each: (load[each], each not in complete, _order(copy.reader, each)))
        found[index] = replace(copy, source=source)
        load[source] += 1
    return replace(part, copies=tuple(found))


def _order(reader: str, source: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{reader} {source}".encode())
