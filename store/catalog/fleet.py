"""Readers that follow the store, and switches of a fleet: what they ask, and their changes, as pure functions.

A switch is committed by the very change that makes its last reader ready, so its proposer need not live until then.
While it is undecided, a change that removes a dead reader, or `abort`, may decide it as well. A decision is final.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from holdfast.comms.errors import Mismatch
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog.records import Catalog, Reader, SwitchRecord
from holdfast.store.catalog.settling import live_switches, settle
from holdfast.store.errors import ReaderReplaced

DECISIONS = 16
"""The number of past switches that the catalogue keeps, so that a proposer learns how its own was decided."""

Digests = tuple[bytes, ...]
"""The digests of all parts of a version: they tell it from another one of the same number."""


# -- what readers must serve, and what must stay for them


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
    latest = () if catalog.latest is None else (catalog.latest,)
    return tuple(dict.fromkeys((*needed(catalog, reader), *latest)))


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


# -- readers


def register(catalog: Catalog, reader: Reader) -> Catalog:
    """Add a reader. Raises `Mismatch` if one with its id lives on the same host.

    It replaces a reader of another host, which finds that out before its next batch.
    """
    known = find_reader(catalog, reader.id)
    if known is not None and known.token == reader.token:
        return catalog
    if known is not None and known.peer.host == reader.peer.host:
        raise Mismatch(
            f"process {known.pid} follows as reader {reader.id!r}: close its follower first, or take another name"
        )
    others = tuple(each for each in catalog.readers if each.id != reader.id)
    must = joins(replace(catalog, readers=others), reader.id) if reader.switched else 0
    proposed = preparing(catalog)
    if proposed is not None and reader.id in proposed.gone:
        gone = tuple(each for each in proposed.gone if each != reader.id)
        catalog = _with_switch(catalog, replace(proposed, gone=gone))
    return settle(replace(catalog, readers=(*others, replace(reader, must=must))))


def unregister(catalog: Catalog, reader_id: str, token: str) -> Catalog:
    """Remove a reader that closes."""
    return _without(catalog, lambda each: each.id == reader_id and each.token == token)


def report(
    catalog: Catalog, reader_id: str, token: str, pinned: Collection[int], ready: Mapping[int, Digests]
) -> Catalog:
    """Set which versions a reader keeps in the store, and of which it has the bytes.

    Versions that are no longer there are left out. Changes nothing if that would take away a version that a switch asks
    of the reader. Raises `ReaderReplaced` if the reader is not in the catalogue.
    """
    reader = own(catalog, reader_id, token)
    has = {number for number, digests in ready.items() if digests_of(catalog, number) == digests != ()}
    if set(reader.ready).difference(has).intersection(needed(catalog, reader)):
        return catalog
    keeps = set(pinned).intersection(catalog.visible())
    after = replace(reader, pinned=tuple(sorted(keeps)), ready=tuple(sorted(has)))
    return catalog if after == reader else settle(decide_switch(_with_reader(catalog, after)))


def acknowledge(catalog: Catalog, reader_id: str, token: str, version: int) -> Catalog:
    """Record that a reader serves a version. A switched one must be ready for it (`Mismatch`).

    Changes nothing if a switched reader must serve another version by now. Raises `ReaderReplaced`.
    """
    reader = own(catalog, reader_id, token)
    if not reader.switched:
        return _with_reader(catalog, replace(reader, served=version))
    if version not in reader.ready:
        raise Mismatch(f"reader {reader_id!r} cannot serve version {version}: it is not ready")
    must = target(catalog, reader)
    if must is None or must.version != version:
        return catalog
    return settle(_forget(_with_reader(catalog, replace(reader, served=version, acknowledged=must.serial))))


def refuse(catalog: Catalog, reader_id: str, token: str, version: int, why: str) -> Catalog:
    """Record that a reader cannot take the proposed version."""
    reader, proposed = own(catalog, reader_id, token), preparing(catalog)
    if proposed is None or proposed.version != version or reader.id not in proposed.readers:
        return catalog
    others = tuple(each for each in proposed.refused if each[0] != reader_id)
    return settle(decide_switch(_with_switch(catalog, replace(proposed, refused=(*others, (reader_id, why))))))


def remove_dead_readers(catalog: Catalog, dead: Collection[Peer]) -> Catalog:
    """Remove readers of ended processes, and abort the undecided switch of an ended proposer.

    It also aborts a switch to a version that has no replica any more.
    """
    catalog = decide_switch(_without(catalog, lambda each: each.peer in dead))
    proposed = preparing(catalog)
    if proposed is not None and proposed.proposer in dead:
        catalog = abort(catalog, proposed.token, f"its proposer, process {proposed.proposer.pid}, died")
    return settle(catalog)


def remove_readers_of(catalog: Catalog, holder_id: str) -> Catalog:
    """Remove the readers of a store that closes."""
    return _without(catalog, lambda each: each.holder == holder_id)


def own(catalog: Catalog, reader_id: str, token: str) -> Reader:
    """The reader with this id and token. Raises `ReaderReplaced`."""
    found = find_reader(catalog, reader_id)
    if found is None or found.token != token:
        raise ReaderReplaced(reader_id, None if found is None else found.pid)
    return found


# -- switches


def propose(
    catalog: Catalog,
    token: str,
    version: int,
    readers: Sequence[str] | None,
    quorum: int | None,
    patience: float,
    proposer: Peer,
) -> Catalog:
    """Propose that readers (all switched ones if None) serve a visible version; `token` names the proposal.

    The same proposal again changes nothing; nor does one while another is undecided: wait for that. Raises
    `NoSuchVersion`, and ValueError for a quorum that cannot be.
    """
    if find_switch(catalog, token) is not None:
        return catalog
    catalog.need(version)
    switched = [each.id for each in catalog.readers if each.switched]
    names = tuple(sorted(set(switched if readers is None else readers)))
    if not names:
        raise Mismatch("a switch needs readers: no process follows this store as a named reader")
    if follows := [each.id for each in catalog.readers if each.id in names and not each.switched]:
        raise Mismatch(f"reader {follows[0]!r} follows the latest version, and no switches; follow with reader=")
    if quorum is not None and not 1 <= quorum <= len(names):
        raise ValueError(f"quorum={quorum} of {len(names)} readers: it is from 1 to their number")
    if preparing(catalog) is not None:
        return catalog
    serial = 1 + max((each.serial for each in catalog.switches), default=0)
    switch = SwitchRecord(serial, token, version, names, quorum, patience, proposer)
    return settle(decide_switch(replace(catalog, switches=(*catalog.switches, switch))))


def abort(catalog: Catalog, token: str, reason: str) -> Catalog:
    """Abort a switch unless it is decided."""
    switch = find_switch(catalog, token)
    if switch is None or not switch.preparing:
        return catalog
    return settle(_forget(_with_switch(catalog, _decided(catalog, switch, "aborted", reason))))


def decide_switch(catalog: Catalog) -> Catalog:
    """Commit or abort the undecided switch if the reports of its readers allow no other end.

    Readers on hosts that are away are counted out, and must catch up when they are back.
    """
    switch = preparing(catalog)
    if switch is None:
        return catalog
    ready = ready_for(catalog, switch)
    away = {each.id for each in catalog.readers if each.peer.host in catalog.away}
    able = set(switch.readers).difference(away, switch.gone, (name for name, _ in switch.refused))
    needs = max(1, len(able)) if switch.quorum is None else switch.quorum
    refusals = "; ".join(f"reader {name!r} cannot take it: {why}" for name, why in switch.refused)
    if len(ready) >= needs and not (switch.quorum is None and refusals):
        decided = _decided(catalog, switch, "committed", "")
        named = [replace(each, must=switch.serial) if each.id in switch.readers else each for each in catalog.readers]
        catalog = replace(catalog, readers=tuple(named))
    elif len(able) < needs or (switch.quorum is None and refusals):
        left = f"{len(able)} of {len(switch.readers)} readers are left, and {needs} are needed"
        decided = _decided(catalog, switch, "aborted", refusals or left)
    elif switch.version not in catalog.visible():
        decided = _decided(catalog, switch, "aborted", f"version {switch.version} is lost")
    else:
        return catalog
    return _forget(_with_switch(catalog, decided))


def ready_for(catalog: Catalog, switch: SwitchRecord) -> tuple[str, ...]:
    """The readers named by a switch that are ready for its version; once it is decided, those that were then."""
    if not switch.preparing:
        return switch.ready
    staying = [each for each in catalog.readers if each.switched and each.peer.host not in catalog.away]
    found = {each.id for each in staying if switch.version in each.ready}
    return tuple(name for name in switch.readers if name in found)


def _decided(catalog: Catalog, switch: SwitchRecord, state: str, reason: str) -> SwitchRecord:
    return replace(switch, state=state, reason=reason, ready=ready_for(catalog, switch))


# -- helpers


def _with_reader(catalog: Catalog, reader: Reader) -> Catalog:
    readers = tuple(reader if each.id == reader.id else each for each in catalog.readers)
    return replace(catalog, readers=readers)


def _with_switch(catalog: Catalog, switch: SwitchRecord) -> Catalog:
    switches = tuple(switch if each.token == switch.token else each for each in catalog.switches)
    return replace(catalog, switches=switches)


def _without(catalog: Catalog, gone: Callable[[Reader], bool]) -> Catalog:
    names = {each.id for each in catalog.readers if gone(each)}
    if not names:
        return catalog
    catalog = replace(catalog, readers=tuple(each for each in catalog.readers if each.id not in names))
    proposed = preparing(catalog)
    if proposed is not None and (named := names.intersection(proposed.readers)):
        catalog = _with_switch(catalog, replace(proposed, gone=tuple(sorted({*proposed.gone, *named}))))
    return settle(_forget(decide_switch(catalog)))


def _forget(catalog: Catalog) -> Catalog:
    """Keep the switches that readers must carry out, and the newest decisions."""
    live = live_switches(catalog)
    recent = catalog.switches[-DECISIONS:]
    return replace(catalog, switches=tuple(each for each in catalog.switches if each in live or each in recent))
