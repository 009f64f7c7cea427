"""Where replicas lie: in different processes and on different hosts, as `spread` says; which hosts are away.

Hosts notice by their own turns that another one no longer beats; no clock is compared.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.comms.transport.base import Peer
from holdfast.ft.registers import open_cell
from holdfast.store import StoreTimeout, WeightStore
from holdfast.store.catalog import fleet, transitions
from holdfast.store.catalog.failure_domains import (
    AWAY_TURNS,
    BeatCounter,
    HostBeats,
    candidates,
    why_unsafe,
    with_beat,
)
from holdfast.store.catalog.records import Catalog, Holder, Reader, Version
from support.children import Start
from support.samples.store_processes import move_to_host
from support.weights.catalogs import DIGEST, announced, copied, joined, replica

HOSTS = ("north", "south", "west")


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
    beats = HostBeats(numbers={"old": 7, "south": 3})
    assert with_beat(beats, "north", {"north", "south"}).numbers == {"south": 3, "north": 1}


# -- what follows in the catalogue


def holders(**hosts: int) -> Catalog:
    """A catalogue with so many holders on each host, called north0, north1, south0, ..."""
    names = [(host, number) for host, count in hosts.items() for number in range(count)]
    return joined(*(Holder(f"{host}{number}", Peer(host, 100 + at, 7)) for at, (host, number) in enumerate(names)))


def on_two_hosts(**hosts: int) -> Catalog:
    """The catalogue with version 1, which north0 has published and south0 has copied."""
    return copied(announced(holders(**hosts), "north0", replicas=2), "south0")


def kept_by(catalog: Catalog) -> list[str]:
    return [each.holder for each in catalog.versions[0].shards[0].replicas]


def missed_by(catalog: Catalog, holder: str) -> list[int]:
    return [shard.part for _, shard, _ in transitions.missing(catalog, holder)]


def turns(catalog: Catalog) -> dict[str, int]:
    version = catalog.versions[0]
    return {holder.id: turn for holder, turn in candidates(catalog, version, version.shards[0])}


def test_replicas_of_a_host_that_is_away_are_made_elsewhere_and_dropped_then() -> None:
    before = on_two_hosts(north=2, south=1)
    catalog = transitions.hosts_away(before, {"south"})
    assert [holder.id for holder in catalog.holders] == ["north0", "north1", "south0"], "it may be needed"
    assert missed_by(catalog, "north1") == [0]
    after = copied(catalog, "north1")
    assert kept_by(after) == ["north0", "north1"]
    assert after.holder("south0") is None and after.away == ()
    assert missed_by(transitions.join(after, before.holders[-1]), "south0") == [0], "it moves there"


def test_a_host_that_comes_back_earlier_has_its_replicas_still() -> None:
    before = on_two_hosts(north=1, south=1)
    catalog = transitions.hosts_away(before, {"south"})
    assert list(transitions.moved(before, catalog)) == [("host_away", "south")]
    back = transitions.host_back(catalog, "south")
    assert back == transitions.join(transitions.remove_dead_holders(back, ()), before.holders[-1])
    assert kept_by(back) == ["north0", "south0"] and back.safe(back.versions[0], back.versions[0].shards[0])
    assert list(transitions.moved(catalog, back)) == [("host_back", "south")]


def test_what_a_host_was_still_publishing_goes_with_it() -> None:
    catalog = announced(holders(north=1, south=1), "south0", replicas=2)
    catalog = transitions.hosts_away(catalog, {"south"})
    assert catalog.versions == () and [holder.id for holder in catalog.holders] == ["north0"]


def test_readers_of_a_host_that_is_away_do_not_hold_up_a_switch() -> None:
    """They are counted out, and must catch up when they are back."""
    catalog = on_two_hosts(north=1, south=1)
    for holder in catalog.holders:
        reader = Reader(f"g {holder.id}", f"token {holder.id}", holder.id, holder.peer, switched=True)
        catalog = fleet.register(catalog, reader)
    catalog = fleet.propose(catalog, "switch", 1, None, None, 10.0, catalog.holders[0].peer)
    catalog = fleet.report(catalog, "g north0", "token north0", (1,), {1: (DIGEST,)})
    assert catalog.switches[0].preparing
    catalog = transitions.hosts_away(catalog, {"south"})
    assert catalog.switches[0].state == "committed" and catalog.switches[0].ready == ("g north0",)
    assert [reader.must for reader in catalog.readers] == [1, 1]


def test_a_part_is_published_once_it_is_on_as_many_hosts_as_its_spread_asks_for() -> None:
    catalog = announced(holders(north=2, south=2), "north0", replicas=2, spread="auto")
    first = turns(announced(holders(north=3, south=1, west=1), "north0", replicas=3, spread="processes"))
    assert {holder for holder, turn in first.items() if turn == 0} == {"south0", "west0"}
    assert {"north1", "north2"} < first.keys(), "they copy it if those on other hosts do not"
    assert "north1" not in turns(catalog)
    assert sorted(turns(catalog).values()) == [0, 1], "the second of the other host is the first one's reserve"
    assert copied(catalog, "north1") == catalog
    assert copied(catalog, "south1").visible() == (1,)
    for there, spread in ((holders(north=2), "auto"), (holders(north=2, south=1), "processes")):
        assert copied(announced(there, "north0", replicas=2, spread=spread), "north1").visible() == (1,)
    catalog = announced(holders(north=3), "north0", replicas=2, spread="hosts")
    assert turns(catalog) == {} and copied(catalog, "north1") == catalog
    catalog = transitions.join(catalog, Holder("south0", Peer("south", 1, 1)))
    assert copied(catalog, "south0").visible() == (1,)


def lack(catalog: Catalog) -> str:
    return why_unsafe(catalog, catalog.versions[0], catalog.versions[0].shards[0])


def test_what_a_part_lacks_is_said_with_what_would_help() -> None:
    alone, pair = (
        announced(there, "north0", replicas=2, spread="hosts")
        for there in (holders(north=3), holders(north=2, south=1))
    )
    assert "on 1 host, and spread='hosts' needs 2; open it on more hosts" in lack(alone)
    assert "on 1 of 2 hosts; this store is open for holding in 3" in lack(pair), "two hosts are enough for two replicas"
    assert lack(pair).endswith("they are stopped, slow or cut off") and "away" not in lack(pair)
    assert "ask for fewer replicas" in lack(announced(holders(north=1), "north0", replicas=2, spread="processes"))
    assert "without those on 1 host away from the register" in lack(replace(pair, away=("south",)))


def test_the_first_publisher_of_a_version_decides_its_spread_and_only_a_publisher_withdraws_a_part() -> None:
    catalog = announced(holders(north=2, south=1), "north0", replicas=2, spread="processes")
    again = replace(catalog.versions[0].shards[0], publisher="north1", replicas=(replica("north1"),))
    catalog = transitions.announce(catalog, Version(1, 1, 2, None, False, (), "hosts"), again, 2)
    assert catalog.visible() == (1,) and catalog.versions[0].spread == "processes"
    catalog = announced(holders(north=2), "north0", replicas=2, spread="processes")
    assert transitions.withdraw(catalog, 1, 0, "north1") == catalog
    assert transitions.withdraw(catalog, 1, 0, "north0").versions == ()


def test_replicas_move_to_a_host_that_joins_and_a_part_waits_for_one_only_while_a_holder_stays_there() -> None:
    catalog = copied(announced(holders(north=3), "north0", replicas=2, spread="auto"), "north1")
    catalog = transitions.join(catalog, Holder("south0", Peer("south", 1, 1)))
    assert turns(catalog) == {"south0": 0}
    assert catalog.visible() == (1,), "what is published stays published"
    assert kept_by(copied(catalog, "south0")) == ["north0", "south0"]
    catalog = announced(holders(north=3, south=1), "north0", replicas=2, spread="auto")
    left = copied(transitions.leave(catalog, "south0"), "north2")
    died = copied(transitions.remove_dead_holders(catalog, {Peer("south", 103, 7)}), "north2")
    assert left.visible() == died.visible() == (1,)


def test_a_holder_departs_when_its_part_is_on_another_host_again_or_no_other_can_copy_it() -> None:
    catalog = copied(announced(holders(north=2, south=2), "north0", replicas=2, spread="auto"), "south0")
    catalog = transitions.leave(catalog, "south0")
    assert not transitions.may_depart(catalog, "south0")
    assert transitions.may_depart(copied(catalog, "south1"), "south0")
    catalog = copied(announced(holders(north=1, south=1), "north0", replicas=2, spread="hosts"), "south0")
    assert transitions.may_depart(transitions.leave(catalog, "south0"), "south0")


# -- stores on hosts, which an environment variable tells apart, over a memory plane that crosses hosts


def a_holder_elsewhere(pipe: Connection, url: str) -> None:
    move_to_host("south")
    pipe.recv()
    with WeightStore(url, plane="ucx"):
        pipe.send("open")
        pipe.recv()


def test_publishing_for_several_hosts_fails_where_there_is_one_and_succeeds_where_there_are_two(
    url: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure says why, and leaves nothing behind."""
    other = start(a_holder_elsewhere, url)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with WeightStore(url, spread="hosts", plane="ucx") as store:
        with pytest.raises(StoreTimeout, match=r"1 of 2 processes keep part 0.*on 1 host, and spread='hosts' needs 2"):
            store.publish(1, {"a": torch.ones(9)}, timeout=0.3)
        assert store.versions() == []
        other.tell("open")
        other.hear()
        store.publish(1, {"a": torch.ones(9)})
        assert len({holder.peer.host for holder in store.holders(1)}) == 2


# -- several stores in one register


def test_stores_of_different_names_know_nothing_of_each_other_nor_of_the_one_without(url: str) -> None:
    with WeightStore(url, name="policy", replicas=1) as policy, WeightStore(url, name="critic", replicas=1) as critic:
        policy.publish(1, {"a": torch.ones(3)})
        critic.publish(1, {"a": torch.zeros(3)})
        policy.publish(2, {"a": torch.ones(3)})
        assert (policy.versions(), critic.versions()) == ([1, 2], [1])
        with WeightStore(url, hold=False) as unnamed, WeightStore(url, name="default", hold=False) as default:
            assert unnamed.versions() == default.versions() == []
        with WeightStore(url, name="critic", hold=False) as reader:
            into = {"a": torch.ones(3)}
            assert reader.get("latest", into) == 1 and into["a"].tolist() == [0.0] * 3
    with WeightStore(url, replicas=1) as store:
        store.publish(1, {"a": torch.ones(3)})
        cell = open_cell(url, "store")
        try:
            assert Catalog.decode(cell.read()[1]).visible() == (1,)
        finally:
            cell.close()


@pytest.mark.parametrize("name", ["", "a/b", ".", "-x", "a b", "é", "x" * 64, "a\n", 7])
def test_a_name_or_a_spread_that_cannot_be_one_is_refused(url: str, name: str) -> None:
    with pytest.raises(ValueError, match="'auto', 'processes', 'hosts'"):
        WeightStore(url, spread=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot name a store"):
        WeightStore(url, name=name)
