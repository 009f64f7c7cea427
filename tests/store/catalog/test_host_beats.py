"""Hosts notice by their own turns that another one no longer beats; no clock is compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fleet, transitions
from holdfast.store.catalog.failure_domains import AWAY_TURNS, BeatCounter, HostBeat, HostBeats, with_beat
from holdfast.store.catalog.records import Catalog, Holder, Reader, Replica, Shard

HOSTS = ("north", "south", "west")
NORTH, SOUTH, MATE = (Holder(name, Peer(name[:5], pid, 1)) for pid, name in enumerate(("north", "south", "north mate")))


class World:
    """Three hosts that take turns: each beats, and looks which others are away."""

    def __init__(self) -> None:
        self.beats = HostBeats()
        self.counters = {host: BeatCounter() for host in HOSTS}

    def turn(self, host: str) -> frozenset[str]:
        self.beats = HostBeats.decode(with_beat(self.beats, host, HOSTS).encode())
        return self.counters[host].turn(self.beats, set(HOSTS) - {host})


@given(rounds=st.lists(st.permutations(HOSTS), max_size=40), slow=st.integers(1, AWAY_TURNS - 2))
def test_a_host_that_beats_now_and_then_is_not_away(rounds: list[list[str]], slow: int) -> None:
    """One of them beats once in `slow` rounds only; the order differs from round to round."""
    world = World()
    for number, order in enumerate(rounds):
        for host in order:
            if host != "west" or number % slow == 0:
                assert world.turn(host) == frozenset(), (number, host)


@given(before=st.integers(0, 5), silent=st.sampled_from(HOSTS), fast=st.integers(1, 5))
def test_each_host_finds_by_its_own_turns_that_another_is_silent(before: int, silent: str, fast: int) -> None:
    """One observer's turns are faster: it finds it earlier than the other, and neither before its time."""
    world = World()
    one, other = (host for host in HOSTS if host != silent)
    for _ in range(before):
        for host in (one, other, silent):
            world.turn(host)
    for host in (one, other):
        assert world.turn(host) == frozenset()
    for number in range(1, AWAY_TURNS + 1):
        found = [world.turn(one) for _ in range(fast)]
        slow = world.turn(other)
        assert slow == (frozenset({silent}) if number >= AWAY_TURNS else frozenset())
        assert found[-1] == (frozenset({silent}) if number * fast >= AWAY_TURNS else frozenset())
    world.turn(silent)
    assert world.turn(one) == world.turn(other) == frozenset(), "it is back"


def test_beats_of_hosts_without_holders_are_forgotten() -> None:
    beats = HostBeats(beats=(HostBeat("old", 7), HostBeat("south", 3)))
    assert with_beat(beats, "north", {"north", "south"}).beats == (HostBeat("south", 3), HostBeat("north", 1))


@pytest.mark.parametrize("data", [b"", b"\xff", HostBeats(layout=1).encode()])
def test_malformed_beats_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        HostBeats.decode(data)


# -- what follows in the catalogue


def replica(holder: Holder) -> Replica:
    return Replica(holder.id, Handle("shm", holder.id.encode(), 100))


def published(*holders: Holder, replicas: int = 2) -> Catalog:
    """Version 1 in the first `replicas` of these holders; the first has published it."""
    catalog = Catalog()
    for holder in holders:
        catalog = transitions.join(catalog, holder)
    first = Shard(0, b"x" * 16, 50, holders[0].id, (replica(holders[0]),))
    catalog = transitions.announce(catalog, 1, first, parts=1, replicas=replicas, keep=2, fence=None)
    for holder in holders[1:replicas]:
        catalog = transitions.replicated(catalog, 1, 0, b"x" * 16, replica(holder))
    assert catalog.visible() == (1,)
    return catalog


def kept_by(catalog: Catalog) -> list[str]:
    return [each.holder for each in catalog.versions[0].shards[0].replicas]


def test_replicas_of_a_host_that_is_away_are_made_elsewhere_and_dropped_then() -> None:
    catalog = transitions.hosts_away(published(NORTH, SOUTH, MATE), {"south"})
    assert [holder.id for holder in catalog.holders] == [NORTH.id, SOUTH.id, MATE.id], "it may be needed"
    assert [shard.part for _, shard, _ in transitions.missing(catalog, MATE.id)] == [0]
    after = transitions.replicated(catalog, 1, 0, b"x" * 16, replica(MATE))
    assert kept_by(after) == [NORTH.id, MATE.id]
    assert after.holder(SOUTH.id) is None and after.away == ()
    again = transitions.join(after, SOUTH)
    assert [shard.part for _, shard, _ in transitions.missing(again, SOUTH.id)] == [0], "it moves there"


def test_a_host_that_comes_back_earlier_has_its_replicas_still() -> None:
    catalog = transitions.hosts_away(published(NORTH, SOUTH), {"south"})
    assert list(transitions.moved(published(NORTH, SOUTH), catalog)) == [("host_away", "south")]
    back = transitions.host_back(catalog, "south")
    assert back == transitions.join(transitions.remove_dead_holders(back, ()), SOUTH)
    assert kept_by(back) == [NORTH.id, SOUTH.id] and back.safe(back.versions[0], back.versions[0].shards[0])
    assert list(transitions.moved(catalog, back)) == [("host_back", "south")]


def test_what_a_host_was_still_publishing_goes_with_it() -> None:
    catalog = transitions.join(transitions.join(Catalog(), NORTH), SOUTH)
    first = Shard(0, b"x" * 16, 50, SOUTH.id, (replica(SOUTH),))
    catalog = transitions.announce(catalog, 1, first, parts=1, replicas=2, keep=2, fence=None)
    catalog = transitions.hosts_away(catalog, {"south"})
    assert catalog.versions == () and [holder.id for holder in catalog.holders] == [NORTH.id]


def test_readers_of_a_host_that_is_away_do_not_hold_up_a_switch() -> None:
    """They are counted out, and must catch up when they are back."""
    catalog = published(NORTH, SOUTH)
    for holder in (NORTH, SOUTH):
        reader = Reader(f"g {holder.id}", f"token {holder.id}", holder.id, holder.peer, switched=True)
        catalog = fleet.register(catalog, reader)
    catalog = fleet.propose(catalog, "switch", 1, None, None, 10.0, NORTH.peer)
    catalog = fleet.report(catalog, "g north", "token north", (1,), {1: (b"x" * 16,)})
    assert catalog.switches[0].preparing
    catalog = transitions.hosts_away(catalog, {"south"})
    assert catalog.switches[0].state == "committed" and catalog.switches[0].ready == ("g north",)
    assert [reader.must for reader in catalog.readers] == [1, 1]
