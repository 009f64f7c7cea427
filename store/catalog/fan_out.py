"""Assigns sources to readers, so that readers serve readers. Pure functions.

The first readers on other hosts read a part from its replicas, and list their copies; later ones read from these. A
reader first asks for its copy (`request_copy`), is assigned a source, reads, and lists the copy (`announce_copy`).
`assigned` decides: no source serves more than `AT_ONCE` assigned readers at a time, and replicas serve only while there
are fewer than `SEEDS` copies. So a publisher sends a constant number of copies, however many readers there are.

Readers of one host need one copy, which they map. Many hosts form groups (`ReaderGroup`), each with a register cell, so
that thousands of readers do not change the catalogue. The hosts of a group share one copy that its first reader, the
leader, asks for in the catalogue: a part has at most `COPIES` of them. The others are served within the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import ClassVar

import msgspec
import xxhash
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.store.catalog.records import Catalog, CellRecord, Holder, Replica, ServingCopy, Shard, Version

AT_ONCE = 1
"""The number of readers that one source serves at a time: with more, all of them finish later, and serve later."""
SEEDS = 4
"""The number of copies that are read from replicas; the others are read from copies."""
COPIES = 64
"""The limit of copies of a part that are listed or asked for. Readers beyond it read without an assigned source."""
FEW_HOSTS = 4
"""With one follower on each of at most so many hosts without a replica, each reads from replicas, straight into its
tensors."""


def assigned(copies: Sequence[ServingCopy], seeds: Collection[str], first: int = SEEDS) -> tuple[ServingCopy, ...]:
    """The copies after each reader that waits has been assigned a source, as far as sources are free.

    `seeds` are sources for the `first` copies. A reader waits again if its source is gone. Readers are served in order,
    by the source with the fewest readers, rather by a copy than by a seed.
    """
    sources = {*seeds, *(each.reader for each in copies if each.handle is not None)}
    found = [each if each.handle or each.source in sources else replace(each, source="") for each in copies]
    load = Counter(each.source for each in found if each.handle is None)
    begun = sum(each.handle is not None or each.source != "" for each in found)
    complete = [each.reader for each in found if each.handle is not None]
    for index, copy in enumerate(found):
        if copy.handle is not None or copy.source:
            continue
        able = [each for each in (*complete, *(seeds if begun < first else ())) if load[each] < AT_ONCE]
        if not able:
            break
        source = min(able, key=lambda each: (load[each], each not in complete, _order(copy.reader, each)))
        found[index] = replace(copy, source=source)
        load[source] += 1
        begun += 1
    return tuple(found)


def request_copy(catalog: Catalog, number: int, part: int, digest: bytes, reader: Holder) -> Catalog:
    """Ask for a source from which a reader copies a part of the latest version for its host.

    Changes nothing if its host has the part or asks for it already, or the limit is reached.
    """
    if (found := catalog.find(number, part, digest)) is None or number != catalog.latest:
        return catalog
    version, shard = found
    if len(shard.copies) >= COPIES or on_host(catalog, shard, reader.peer.host):
        return catalog
    if any(_host(catalog, each.reader) == reader.peer.host for each in shard.copies):
        return catalog
    if catalog.holder(reader.id) is None:
        catalog = replace(catalog, holders=(*catalog.holders, replace(reader, leaving=True)))
    return _with_copies(catalog, version, shard, (*shard.copies, ServingCopy(reader.id)))


def announce_copy(catalog: Catalog, number: int, part: int, digest: bytes, reader: str, handle: Handle) -> Catalog:
    """List a reader's copy, which is complete and exposed, as a source. Changes nothing unless it was asked for."""
    if (found := catalog.find(number, part, digest)) is None:
        return catalog
    version, shard = found
    copies = tuple(ServingCopy(reader, handle=handle) if each.reader == reader else each for each in shard.copies)
    return _with_copies(catalog, version, shard, copies)


def withdraw_copy(catalog: Catalog, number: int, part: int, reader: str) -> Catalog:
    """Remove a copy, or the request for it: the reader gave up, or its copy cannot be read. Its readers ask anew."""
    if (found := catalog.find(number, part)) is None:
        return catalog
    version, shard = found
    return _with_copies(catalog, version, shard, [each for each in shard.copies if each.reader != reader])


def settled_copies(catalog: Catalog, version: Version, shard: Shard) -> Shard:
    """The part after all changes that follow from others: stores that are gone, a newer version.

    Copies of a version that is not the latest go once no reader waits for one.
    """
    known = {holder.id for holder in catalog.holders if holder.peer.host not in catalog.away}
    copies = [each for each in shard.copies if each.reader in known]
    if version.number != catalog.latest and all(each.handle is not None for each in copies):
        copies = []
    seeds = [each.holder for each in shard.replicas if not catalog.is_away(each.holder)]
    return replace(shard, copies=assigned(copies, seeds))


def worthwhile(catalog: Catalog, shard: Shard, host: str) -> bool:
    """Whether the readers of a host should share a copy.

    They should if the host has none, and several readers follow there, or on many such hosts.
    """
    replicas = {_host(catalog, each.holder) for each in shard.replicas}
    following = Counter(each.peer.host for each in catalog.readers)
    return not on_host(catalog, shard, host) and (following[host] > 1 or len(following.keys() - replicas) > FEW_HOSTS)


def on_host(catalog: Catalog, shard: Shard, host: str) -> bool:
    """Whether a host has a replica of a part, or a complete copy."""
    there = [each.holder for each in shard.replicas] + [each.reader for each in shard.copies if each.handle is not None]
    return any(_host(catalog, each) == host for each in there)


def _with_copies(catalog: Catalog, version: Version, shard: Shard, copies: Sequence[ServingCopy]) -> Catalog:
    changed = settled_copies(catalog, version, replace(shard, copies=tuple(copies)))
    return catalog.with_version(version.with_shard(changed))


def _host(catalog: Catalog, holder_id: str) -> str | None:
    holder = catalog.holder(holder_id)
    return None if holder is None else holder.peer.host


def _order(reader: str, source: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{reader} {source}".encode())


GROUPS = 32
ABOVE = "above"
"""The source of a group's leader: what the catalogue assigns."""
MEMBER_COPIES = 1024
"""The limit of a part's copies in a group."""


class GroupPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a version, and its copies in the group."""

    number: int
    part: int
    digest: bytes
    copies: tuple[ServingCopy, ...]


class ReaderGroup(CellRecord, frozen=True, array_like=True):
    """The readers of a group that have or want copies, and the parts of which they do."""

    what: ClassVar[str] = "a group of readers"
    readers: tuple[Holder, ...] = ()
    parts: tuple[GroupPart, ...] = ()

    def part(self, number: int, part: int, digest: bytes) -> GroupPart:
        key = (number, part, digest)
        found = next((each for each in self.parts if (each.number, each.part, each.digest) == key), None)
        return found or GroupPart(number, part, digest, ())

    def reader(self, reader_id: str) -> Holder | None:
        return next((each for each in self.readers if each.id == reader_id), None)


def group_of(host: str) -> int:
    """The number of the group to which a host belongs."""
    return xxhash.xxh3_64_intdigest(host.encode()) % GROUPS


def request_in_group(group: ReaderGroup, number: int, part: int, digest: bytes, reader: Holder) -> ReaderGroup:
    """Ask for a copy for the reader's host.

    Changes nothing if a reader of that host has a copy or asks for one, or the limit is reached. Copies of other
    versions go, unless readers wait for them.
    """
    there = group.part(number, part, digest)
    if asks(group, there, reader.peer.host) or len(there.copies) >= MEMBER_COPIES:
        return group
    if group.reader(reader.id) is None:
        group = replace(group, readers=(*group.readers, reader))
    changed = replace(there, copies=(*there.copies, ServingCopy(reader.id)))
    parts = [each for each in group.parts if each != there and (each.number == number or _awaited(each))]
    return _settled_group(replace(group, parts=(*parts, changed)))


def announce_in_group(
    group: ReaderGroup, number: int, part: int, digest: bytes, reader: str, handle: Handle
) -> ReaderGroup:
    """List a reader's copy, which is complete and exposed. Changes nothing unless it was asked for."""
    return _with_group_copies(
        group,
        group.part(number, part, digest),
        [
            ServingCopy(reader, handle=handle) if each.reader == reader else each
            for each in group.part(number, part, digest).copies
        ],
    )


def withdraw_in_group(group: ReaderGroup, number: int, part: int, digest: bytes, reader: str) -> ReaderGroup:
    """Remove a copy, or the request_in_group for it."""
    there = group.part(number, part, digest)
    return _with_group_copies(group, there, [each for each in there.copies if each.reader != reader])


def remove_readers(group: ReaderGroup, gone: Collection[str]) -> ReaderGroup:
    """Remove stores that have closed, or died with their processes, and their copies."""
    readers = tuple(each for each in group.readers if each.id not in gone)
    return group if len(readers) == len(group.readers) else _settled_group(replace(group, readers=readers))


def copy_on(group: ReaderGroup, there: GroupPart, host: str) -> Replica | None:
    """The complete copy on a host, if the group lists one."""
    for copy in there.copies:
        reader = group.reader(copy.reader)
        if copy.handle is not None and reader is not None and reader.peer.host == host:
            return Replica(copy.reader, copy.handle)
    return None


def asks(group: ReaderGroup, there: GroupPart, host: str) -> bool:
    """Whether a reader of a host has a copy or asks for one."""
    return any(found.peer.host == host for each in there.copies if (found := group.reader(each.reader)))


def source_of(there: GroupPart, reader: str) -> Replica | str | None:
    """The source that a reader was assigned: a copy in the group, or `ABOVE`.

    "" if it waits for one, None if it has not asked.
    """
    mine = next((each for each in there.copies if each.reader == reader), None)
    if mine is None or mine.source in ("", ABOVE):
        return None if mine is None else mine.source
    return next(
        Replica(each.reader, each.handle) for each in there.copies if each.handle and each.reader == mine.source
    )


def _with_group_copies(group: ReaderGroup, there: GroupPart, copies: Collection[ServingCopy]) -> ReaderGroup:
    parts = [replace(each, copies=tuple(copies)) if each == there else each for each in group.parts]
    return _settled_group(replace(group, parts=tuple(parts)))


def _settled_group(group: ReaderGroup) -> ReaderGroup:
    known = {each.id for each in group.readers}
    parts = []
    for part in group.parts:
        copies = assigned([each for each in part.copies if each.reader in known], [ABOVE], first=1)
        if copies:
            parts.append(replace(part, copies=copies))
    return replace(group, parts=tuple(parts))


def _awaited(part: GroupPart) -> bool:
    return any(each.handle is None for each in part.copies)
