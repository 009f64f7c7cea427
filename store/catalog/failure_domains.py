"""Hosts as failure domains: which holders should copy a part, and which hosts are away. Pure functions.

A part's replicas lie in different processes, on different hosts. Clocks of different hosts are never compared: each
host raises its own number once a turn, and counts its own turns in which the number of another host stays as it was. A
turn needs the register, so a host without it counts nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import msgspec
import xxhash
from msgspec.structs import replace

from holdfast.ft.console.units import counted
from holdfast.store.catalog.records import Catalog, CellRecord, Holder, Shard, Version


def candidates(catalog: Catalog, version: Version, shard: Shard) -> tuple[tuple[Holder, int], ...]:
    """The holders that could make a part safer, each with its turn.

    Turn 0 is for the first to copy it; the others follow in turns 1, 2, ... The first of each host without a replica
    come before all others. All holders compute the same order, which differs from part to part.
    """
    if all(catalog.is_away(each.holder) for each in shard.replicas) or catalog.safe(version, shard):
        return ()
    able = [each for each in catalog.holders if catalog.stays(each) and helps(catalog, version, shard, each)]
    able.sort(key=lambda each: (xxhash.xxh3_64_intdigest(shard.digest + each.id.encode()), each.id))
    covered = {peer.host for peer in catalog.keeping(shard)}
    first: dict[str, Holder] = {}
    for holder in able:
        if holder.peer.host not in covered:
            first.setdefault(holder.peer.host, holder)
    rest = [each for each in able if first.get(each.peer.host) is not each]
    lacking, hosts = catalog.lacking(version, shard)
    turns = [max(0, place - lacking + 1) for place in range(len(able))]
    if lacking == hosts:  # the rest are only needed if the first of their host does nothing
        turns[len(first) :] = [max(1, turn) for turn in turns[len(first) :]]
    return tuple(zip((*first.values(), *rest), turns, strict=True))


def helps(catalog: Catalog, version: Version, shard: Shard, holder: Holder) -> bool:
    """Whether a replica of a staying holder would bring a part closer to being safe."""
    keeping = catalog.keeping(shard)
    lacking, hosts = catalog.lacking(version, shard)
    new_host = all(peer.host != holder.peer.host for peer in keeping)
    return holder.peer not in keeping and (lacking > hosts or (new_host and lacking > 0))


def without_surplus(catalog: Catalog, version: Version, shard: Shard) -> Shard:
    """The part without the replicas that it does not need, because later ones lie on other hosts."""
    for replica in reversed(shard.replicas[:-1]):
        holder = catalog.holder(replica.holder)
        fewer = replace(shard, replicas=tuple(each for each in shard.replicas if each != replica))
        if holder is not None and catalog.stays(holder) and catalog.safe(version, fewer):
            shard = fewer
    return shard


def why_unsafe(catalog: Catalog, version: Version, shard: Shard) -> str:
    """What a part lacks and what would help, in words."""
    staying = [each for each in catalog.holders if catalog.stays(each)]
    hosts = len(catalog.hosts())
    pids = ", ".join(map(str, sorted({each.pid for each in staying}))) or "none"
    keeping = catalog.keeping(shard)
    open_in = f"this store is open for holding in {len({each.peer for each in staying})} (pid {pids})"
    found = f"{len(keeping)} of {version.replicas} processes keep part {shard.part}"
    if catalog.away:
        open_in += f", without those on {counted(len(catalog.away), 'host')} away from the register"
    if version.spread == "hosts" and version.replicas > hosts:
        return (
            f"{found}; {open_in} on {counted(hosts, 'host')}, and spread='hosts' needs {version.replicas}; open it on "
            "more hosts, ask for fewer replicas, or for spread='auto'"
        )
    if len({each.peer for each in staying}) < version.replicas:
        return f"{found}; {open_in}; open it in more, or ask for fewer replicas"
    on = f" on {len({peer.host for peer in keeping})} of {hosts} hosts" if hosts > 1 else ""
    return f"{found}{on}; {open_in}, which have not copied it in time: they are stopped, slow or cut off"


AWAY_TURNS = 8
"""A host that does not beat in so many turns of another one is away."""


class HostBeats(CellRecord, frozen=True, array_like=True):
    """How often each host with stores that keep replicas has beaten. They are a register cell of their own."""

    what: ClassVar[str] = "beats of hosts"
    numbers: dict[str, int] = msgspec.field(default_factory=dict)


def with_beat(beats: HostBeats, host: str, hosts: Collection[str]) -> HostBeats:
    """Raise the number of `host`, and forget those of hosts that are not in `hosts`."""
    others = {name: number for name, number in beats.numbers.items() if name in hosts}
    return replace(beats, numbers=others | {host: beats.numbers.get(host, 0) + 1})


class BeatCounter:
    """Counts the turns of one observer in which other hosts did not beat."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def turn(self, beats: HostBeats, others: Collection[str]) -> frozenset[str]:
        """Take a turn of this observer; returns the hosts of `others` that are away."""
        before, self._seen = self._seen, {}
        for host in others:
            number = beats.numbers.get(host, 0)
            known, silent = before.get(host, (-1, 0))
            self._seen[host] = number, silent + 1 if number == known else 0
        return frozenset(host for host, (_, silent) in self._seen.items() if silent >= AWAY_TURNS)
