"""The beats of hosts: counters by which hosts notice that another one is away. Plain data and pure functions.

Clocks of different hosts are never compared. Each host raises its own number once a turn, and counts its own turns in
which the number of another host stays as it was. A turn needs the register, so a host without it counts nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from holdfast.store.catalog.records import CellRecord

AWAY_TURNS = 8
"""A host that does not beat in so many turns of another one is away."""


class HostBeat(msgspec.Struct, frozen=True, array_like=True):
    """The number of beats of a host."""

    host: str
    number: int


class HostBeats(CellRecord, frozen=True, array_like=True):
    """The beats of all hosts with stores that keep replicas. They are a register cell of their own."""

    what: ClassVar[str] = "beats of hosts"
    beats: tuple[HostBeat, ...] = ()

    def number(self, host: str) -> int:
        """How often a host has beaten; 0 if it never did."""
        return next((each.number for each in self.beats if each.host == host), 0)


def with_beat(beats: HostBeats, host: str, hosts: Collection[str]) -> HostBeats:
    """Raise the number of `host`, and forget those of hosts that are not in `hosts`."""
    others = [each for each in beats.beats if each.host != host and each.host in hosts]
    return replace(beats, beats=(*others, HostBeat(host, beats.number(host) + 1)))


class BeatCounter:
    """Counts the turns of one observer in which other hosts did not beat."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def turn(self, beats: HostBeats, others: Collection[str]) -> frozenset[str]:
        """Take a turn of this observer; returns the hosts of `others` that are away."""
        before, self._seen = self._seen, {}
        for host in others:
            number = beats.number(host)
            known, silent = before.get(host, (-1, 0))
            self._seen[host] = number, silent + 1 if number == known else 0
        return frozenset(host for host, (_, silent) in self._seen.items() if silent >= AWAY_TURNS)
