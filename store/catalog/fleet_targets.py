"""What readers and switches ask of the catalogue: the version that a reader must serve, and those that must stay."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.store.catalog.records import Catalog, Reader, SwitchRecord

Digests = tuple[bytes, ...]
"""The digests of all parts of a version: they tell it from another one of the same number."""


def digests_of(catalog: Catalog, number: int) -> Digests:
    """The digests of a visible version; () if it is not there."""
    version = catalog.version(number)
    return () if version is None or not version.visible else tuple(shard.digest for shard in version.shards)


def find_reader(catalog: Catalog, reader_id: str) -> Reader | None:
    return next((each for each in catalog.readers if each.id == reader_id), None)


def find_switch(catalog: Catalog, token: str) -> SwitchRecord | None:
    return next((each for each in catalog.switches if each.token == token), None)


def preparing(catalog: Catalog) -> SwitchRecord | None:
    """The switch that is undecided; there is one at most."""
    return next((each for each in catalog.switches if each.preparing), None)


def target(catalog: Catalog, reader: Reader) -> SwitchRecord | None:
    """The switch that a reader must have carried out to serve."""
    return next((each for each in catalog.switches if each.serial == reader.must), None)


def joins(catalog: Catalog, reader_id: str) -> int:
    """The serial of the switch that a reader joins when it enters; 0 if there is none.

    That is the newest one which names it and which other readers carry out, else the newest of all.
    """
    live = {each.must for each in catalog.readers}
    committed = [each for each in catalog.switches if each.state == "committed"]
    named = [each for each in committed if each.serial in live and reader_id in each.readers]
    return max((each.serial for each in named or committed), default=0)


def wanted(catalog: Catalog, reader: Reader) -> tuple[int, ...]:
    """The versions that a reader should have staged, the most urgent first.

    A switched reader stages the latest version, too: it is probably the next that it is asked for.
    """
    return tuple(dict.fromkeys(_wanted(catalog, reader)))


def _wanted(catalog: Catalog, reader: Reader) -> Iterator[int]:
    yield from needed(catalog, reader)
    if catalog.latest is not None:
        yield catalog.latest


def needed(catalog: Catalog, reader: Reader) -> tuple[int, ...]:
    """The versions that switches ask of a reader: the committed one, then the proposed one."""
    if not reader.switched:
        return ()
    found = []
    if (must := target(catalog, reader)) is not None:
        found.append(must.version)
    proposed = preparing(catalog)
    if proposed is not None and reader.id in proposed.readers:
        found.append(proposed.version)
    return tuple(dict.fromkeys(found))


def may_serve(catalog: Catalog, reader: Reader) -> bool:
    """Whether a switched reader has carried out the switch that it must have."""
    return reader.must != 0 and reader.acknowledged == reader.must


def kept(catalog: Catalog) -> frozenset[int]:
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


def keepers(catalog: Catalog, number: int) -> list[str]:
    """What keeps a version for readers, in words."""
    found = [f"reader {each.id!r} (process {each.pid})" for each in catalog.readers if number in each.pinned]
    return found + [f"{each.state} switch {each.serial}" for each in live_switches(catalog) if each.version == number]
