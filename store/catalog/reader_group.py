"""Groups of reader hosts: each has a register cell, so that thousands of readers do not change the catalogue.

The hosts of a group share one copy of a part that its first reader, the leader, asks for in the catalogue. The others
are served within the group, by the same rule (`fan_out.assigned`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import msgspec
import xxhash
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.store.catalog.fan_out import assigned
from holdfast.store.catalog.records import CellRecord, Holder, Replica, ServingCopy

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


def request(group: ReaderGroup, number: int, part: int, digest: bytes, reader: Holder) -> ReaderGroup:
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
    return _settled(replace(group, parts=(*parts, changed)))


def announce(group: ReaderGroup, number: int, part: int, digest: bytes, reader: str, handle: Handle) -> ReaderGroup:
    """List a reader's copy, which is complete and exposed. Changes nothing unless it was asked for."""
    return _with_copies(
        group,
        group.part(number, part, digest),
        [
            ServingCopy(reader, handle=handle) if each.reader == reader else each
            for each in group.part(number, part, digest).copies
        ],
    )


def withdraw(group: ReaderGroup, number: int, part: int, digest: bytes, reader: str) -> ReaderGroup:
    """Remove a copy, or the request for it."""
    there = group.part(number, part, digest)
    return _with_copies(group, there, [each for each in there.copies if each.reader != reader])


def remove(group: ReaderGroup, gone: Collection[str]) -> ReaderGroup:
    """Remove stores that have closed, or died with their processes, and their copies."""
    readers = tuple(each for each in group.readers if each.id not in gone)
    return group if len(readers) == len(group.readers) else _settled(replace(group, readers=readers))


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


def _with_copies(group: ReaderGroup, there: GroupPart, copies: Collection[ServingCopy]) -> ReaderGroup:
    parts = [replace(each, copies=tuple(copies)) if each == there else each for each in group.parts]
    return _settled(replace(group, parts=tuple(parts)))


def _settled(group: ReaderGroup) -> ReaderGroup:
    known = {each.id for each in group.readers}
    parts = []
    for part in group.parts:
        copies = assigned([each for each in part.copies if each.reader in known], [ABOVE], first=1)
        if copies:
            parts.append(replace(part, copies=copies))
    return replace(group, parts=tuple(parts))


def _awaited(part: GroupPart) -> bool:
    return any(each.handle is None for each in part.copies)
