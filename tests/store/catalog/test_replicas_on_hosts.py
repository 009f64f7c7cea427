"""Where replicas lie, as `spread` says; which hosts are away; and readers that serve the readers of other hosts.

Hosts notice by their own turns that another one no longer beats; no clock is compared.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.comms.transport import liveness
from holdfast.comms.transport.base import Peer
from holdfast.ft.registers import open_cell
from holdfast.store import WeightStore
from holdfast.store.catalog import failure_domains, fan_out, fleet, transitions
from holdfast.store.catalog.client import GroupClient
from holdfast.store.catalog.records import Catalog, DeltaOffer, Holder, Reader, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.holding import host_copies
from holdfast.store.read import part_source
from holdfast.store.read.part_source import PartSource, sources_for
from support.children import Start
from support.mutations import damages, mutated
from support.samples.store_processes import move_to_host
from support.waiting import PATIENCE, eventually
from support.weights.catalogs import DIGEST, announced, copied, joined, replica, shard

HOSTS = ("north", "south", "west")


class World:
    """Three hosts that take turns: each beats, and looks which others are away."""

    def __init__(self) -> None:
        self.beats = failure_domains.HostBeats()
        self.counters = {host: failure_domains.BeatCounter() for host in HOSTS}

    def turn(self, host: str) -> frozenset[str]:
        self.beats = failure_domains.HostBeats.decode(failure_domains.with_beat(self.beats, host, HOSTS).encode())
        return self.counters[host].turn(self.beats, set(HOSTS) - {host})


@given(rounds=st.lists(st.permutations(HOSTS), max_size=40), slow=st.integers(1, failure_domains.AWAY_TURNS - 2))
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
    for number in range(1, failure_domains.AWAY_TURNS + 1):
        found = [world.turn(one) for _ in range(fast)]
        slow = world.turn(other)
        assert slow == (frozenset({silent}) if number >= failure_domains.AWAY_TURNS else frozenset())
        assert found[-1] == (frozenset({silent}) if number * fast >= failure_domains.AWAY_TURNS else frozenset())
    world.turn(silent)
    assert world.turn(one) == world.turn(other) == frozenset(), "it is back"


def test_beats_of_hosts_without_holders_are_forgotten() -> None:
    beats = failure_domains.HostBeats(numbers={"old": 7, "south": 3})
    assert failure_domains.with_beat(beats, "north", {"north", "south"}).numbers == {"south": 3, "north": 1}


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
    return {holder.id: turn for holder, turn in failure_domains.candidates(catalog, version, version.shards[0])}


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
    return failure_domains.why_unsafe(catalog, catalog.versions[0], catalog.versions[0].shards[0])


def test_what_a_part_lacks_is_said_with_what_would_help() -> None:
    alone, pair = (
        announced(there, "north0", replicas=2, spread="hosts")
        for there in (holders(north=3), holders(north=2, south=1))
    )
    assert "on 1 host, and spread='hosts' needs 2; open it on more hosts" in lack(alone)
    assert "on 1 of 2 hosts; this store is open for holding in 3" in lack(pair), "two hosts are enough for two replicas"
    assert lack(pair).endswith("they are stopped, slow or cut off") and "away" not in lack(pair)
    one, two = (announced(holders(north=count), "north0", replicas=2, spread="processes") for count in (1, 2))
    assert "ask for fewer replicas" in lack(one) and "fewer" not in lack(two)
    assert "without those on 1 host away from the register" in lack(replace(pair, away=("south",)))


def test_the_first_publisher_of_a_version_decides_its_spread_and_its_bytes() -> None:
    catalog = announced(holders(north=2, south=1), "north0", replicas=2, spread="processes")
    again = replace(catalog.versions[0].shards[0], publisher="north1", replicas=(replica("north1"),))
    catalog = transitions.announce(catalog, Version(1, 1, 2, None, False, (), "hosts"), again, 2)
    assert catalog.visible() == (1,) and catalog.versions[0].spread == "processes"
    catalog = announced(holders(north=2), "north0", replicas=2, spread="processes")
    with pytest.raises(Mismatch, match="being published with other bytes by process 100"):
        transitions.announce(catalog, Version(1, 1, 2, None, False, ()), shard("north1", digest=b"y" * 16), 2)


def test_a_delta_goes_with_the_replica_of_its_holder() -> None:
    offered = replace(shard("north0", "north1"), delta=DeltaOffer(DIGEST, "north0", replica("north0").handle))
    version = Version(1, 1, 2, None, True, (offered,))
    assert version.with_shard(offered) == version
    assert version.with_shard(replace(offered, replicas=offered.replicas[1:])).shards[0].delta is None


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


# -- readers that serve readers: what source each is assigned, and how a version spreads over many hosts


KEY = (1, 0, DIGEST)
SEEDS = ("north", "south")


def reader(number: int, host: str = "") -> Holder:
    return Holder(f"reader{number}", Peer(host or f"host{number}", 1000 + number, 1), leaving=True)


def requested(group: fan_out.ReaderGroup, *readers: Holder, seeds: Sequence[str] = SEEDS) -> fan_out.ReaderGroup:
    for each in readers:
        group = fan_out.request_copy(group, KEY, each, seeds)
    return group


def announced_by(group: fan_out.ReaderGroup, *readers: Holder) -> fan_out.ReaderGroup:
    for each in readers:
        group = fan_out.announce_copy(group, KEY, each.id, replica(each.id).handle)
    return group


def sources(group: fan_out.ReaderGroup) -> dict[str, str]:
    """The source of each reader that waits or reads."""
    return {each.reader: each.source for each in group.part(KEY).copies if each.handle is None}


def test_a_host_asks_for_one_copy_and_their_number_is_bounded() -> None:
    once = requested(fan_out.ReaderGroup(), reader(1, "west"))
    assert requested(once, reader(2, "west")) is once, "another process of that host is at it"
    copies = tuple(fan_out.ServingCopy(each.id, each.peer) for each in map(reader, range(fan_out.COPIES - 1)))
    group = requested(
        fan_out.ReaderGroup(parts=(fan_out.GroupPart(KEY, SEEDS, copies),)),
        reader(fan_out.COPIES),
        reader(fan_out.COPIES + 1),
    )
    assert len(group.part(KEY).copies) == fan_out.COPIES


def test_a_group_forgets_the_version_before() -> None:
    one, two, newer = reader(1), reader(2), (2, 0, b"y" * 16)
    group = announced_by(requested(fan_out.ReaderGroup(), one, two, seeds=[fan_out.LEAD]), one)
    assert {each.key for each in fan_out.request_copy(group, newer, one).parts} == {KEY, newer}, (
        "a reader still reads it"
    )
    assert {each.key for each in fan_out.request_copy(announced_by(group, two), newer, one).parts} == {newer}


def test_only_readers_on_many_hosts_or_several_on_one_share_a_copy() -> None:
    north = Holder("north", Peer("north", 1, 1))

    def following(*hosts: str) -> Catalog:
        readers = [Reader(str(at), "", "", Peer(host, at, 1), switched=False) for at, host in enumerate(hosts)]
        return Catalog(holders=(north,), readers=tuple(readers))

    def shares(catalog: Catalog, host: str = "a") -> bool:
        return fan_out.worthwhile(catalog, shard("north"), host)

    assert shares(following("a", "a")) and not shares(following("a", "b", "b"))
    assert shares(following(*"abcde")) and not shares(following(*"abcd", "north"))
    assert not shares(following("north", "north"), "north"), "it has the replica"


def test_a_reader_tries_its_own_memory_then_its_host_and_all_spread_over_the_others() -> None:
    here, mate, other = Peer("west", 1, 1), Peer("west", 2, 1), Peer("east", 3, 1)
    holders = tuple(Holder(str(peer.pid), peer) for peer in (other, mate, here))
    found = sources_for(Catalog(holders=holders), shard("3", "2", "1"), here)
    assert [each.holder for each in found] == ["1", "2", "3"]
    catalog = Catalog(holders=tuple(Holder(name, Peer(name, 1, 1)) for name in "abcd"))
    first = Counter(sources_for(catalog, shard(*"abcd"), reader(number).peer)[0].holder for number in range(200))
    assert set(first) == {"a", "b", "c", "d"} and max(first.values()) < 100


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "announce", "withdraw", "close", "die"]), st.integers(0, 9)), max_size=60
    ),
    seeds=st.sets(st.sampled_from(["p", "q"]), min_size=1).map(tuple),
)
def test_no_source_serves_too_many_and_none_is_left_idle(steps: list[tuple[str, int]], seeds: tuple[str, ...]) -> None:
    group = fan_out.ReaderGroup()
    for step, number in steps:
        who = reader(number)
        before = {each.reader: each for each in group.part(KEY).copies}
        if step == "ask":
            group = requested(group, who, seeds=seeds)
        elif step == "announce" and sources(group).get(who.id):
            group = announced_by(group, who)
        elif step == "withdraw":
            group = fan_out.withdraw_copy(group, KEY, who.id)
        elif step in ("close", "die"):
            group = fan_out.remove_readers(group, {who.id if step == "close" else who.peer})
        copies = group.part(KEY).copies
        assert step in ("ask", "announce") or who.id not in {each.reader for each in copies}
        complete = {each.reader for each in copies if each.handle is not None}
        load = Counter(each.source for each in copies if each.handle is None and each.source)
        assert set(load) <= complete | set(seeds) and all(count <= fan_out.AT_ONCE for count in load.values())
        if any(each.handle is None and not each.source for each in copies):
            assert all(load[each] == fan_out.AT_ONCE for each in complete)
            assert len(complete) + load.total() >= len(seeds)
        for each in copies:  # a reader keeps its source as long as that is there
            known = before.get(each.reader)
            if known is not None and known.source in complete | set(seeds) and each.handle is None:
                assert each.source == known.source


def test_readers_that_lose_their_source_together_are_spread_over_those_that_are_left() -> None:
    have = [fan_out.ServingCopy(each.id, each.peer, handle=replica(each.id).handle) for each in map(reader, (0, 1))]
    wait = [fan_out.ServingCopy(each.id, each.peer, source="gone") for each in map(reader, (2, 3, 4))]
    found = fan_out.assigned(fan_out.GroupPart(KEY, (), (*have, *wait)))
    assert sorted(each.source for each in found.copies[2:]) == ["", reader(0).id, reader(1).id]


def test_hosts_are_spread_over_groups() -> None:
    sizes = Counter(fan_out.group_of(f"host {number}") for number in range(fan_out.GROUPS * 40))
    assert len(sizes) == fan_out.GROUPS and max(sizes.values()) < 80


@given(damages)
def test_a_damaged_group_is_read_as_a_group_or_refused(damage: tuple[str, int, int]) -> None:
    group = announced_by(requested(fan_out.ReaderGroup(), reader(1), reader(2)), reader(1))
    assert fan_out.ReaderGroup.decode(group.encode()) == group
    (damaged,) = mutated([group.encode()], *damage)
    try:
        assert isinstance(fan_out.ReaderGroup.decode(damaged), fan_out.ReaderGroup)
    except CorruptData:
        assert damaged != group.encode()


SIZE = 1 << 18


def a_reader(pipe: Connection, url: str, host: str) -> None:
    """Get the versions that the pipe asks for, on a host.

    Sends the id of its store, then for each version the value and the store it came from. It passes over no source
    because its machine is busy.
    """
    part_source.READ_SECONDS = host_copies.STALLED_SECONDS = PATIENCE
    move_to_host(host)
    sources: list[str] = []
    manifest = PartSource.manifest

    def recorded(source: PartSource) -> Manifest:
        found = manifest(source)
        sources.append(source.replica.holder)
        return found

    PartSource.manifest = recorded  # type: ignore[method-assign]
    with WeightStore(url, hold=False, plane="ucx") as store:
        pipe.send(store._replica_holder.holder.id)
        while (version := pipe.recv()) is not None:
            sources.clear()
            into = {"a": torch.zeros(SIZE)}
            store.get(version, into)
            assert len(set(into["a"].tolist())) == 1
            pipe.send((into["a"][0].item(), sources[0]))


def two_hosts(in_one_group: bool) -> tuple[str, str]:
    """Names of two hosts with readers in one group, or in two."""
    first, *others = (f"host {number}" for number in range(1000))
    group = fan_out.group_of(f"{liveness.this_host()}/{first}")
    return first, next(
        each for each in others if (fan_out.group_of(f"{liveness.this_host()}/{each}") == group) == in_one_group
    )


class ReaderFleet:
    """One reader on a host, two on another; a publisher in this process."""

    def __init__(self, url: str, start: Start, in_one_group: bool) -> None:
        south, west = two_hosts(in_one_group)
        self.children = [start(a_reader, url, host) for host in (south, west, west)]
        self.groups = 1 if in_one_group else 2
        self.ids = [child.hear() for child in self.children]
        self.store = WeightStore(url, replicas=1, plane="ucx")
        self.publisher = self.store._replica_holder.holder.id

    def publish(self, version: int) -> None:
        self.store.publish(version, {"a": torch.full((SIZE,), float(version))})

    def get(self, number: int, version: int) -> tuple[float, str]:
        """A reader's value of a version, and the store that it was read from."""
        self.children[number].tell(version)
        value, source = self.children[number].hear()
        return value, source

    def copies(self, version: int) -> list[fan_out.ServingCopy]:
        """The copies that leaders have of a version."""
        with contextlib.closing(GroupClient(self.store.url, self.store.name, fan_out.LEADERS)) as group:
            return [each for part in group.read()[1].parts if part.key[0] == version for each in part.copies]

    def follow(self, hosts: int) -> None:
        """Let followers on so many other hosts be known, so that it pays to share copies."""
        for number in range(hosts):
            peer = Peer(f"other host {number}", 1000 + number, 1)
            reader = Reader(f"reader {number}", "token", "", peer, switched=False)
            self.store._catalog_client.change(lambda now, each=reader: fleet.register(now, each))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["one group", "two groups"])
def fleet_of_readers(
    url: str, start: Start, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ReaderFleet]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    found = ReaderFleet(url, start, request.param)
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
        found.store.close()


@pytest.mark.parametrize("fleet_of_readers", [True, False], ids=["one group", "two groups"], indirect=True)
def test_the_first_reader_reads_from_the_publisher_and_serves_the_next(fleet_of_readers: ReaderFleet) -> None:
    readers = fleet_of_readers
    readers.follow(fan_out.FEW_HOSTS)
    readers.publish(1)
    assert readers.get(0, 1) == readers.get(1, 1) == (1.0, readers.publisher), "few read straight from the replicas"
    assert readers.copies(1) == []
    readers.follow(fan_out.FEW_HOSTS + 1)
    readers.publish(2)
    assert readers.get(0, 2) == (2.0, readers.publisher)
    assert readers.get(1, 2) == (2.0, readers.ids[0])
    assert readers.get(2, 2) == (2.0, readers.ids[1]), "its host has the copy of another process"
    assert readers.get(2, 2) == (2.0, readers.ids[1])
    listed = readers.copies(2)
    assert {each.reader for each in listed} == set(readers.ids[: readers.groups])
    assert all(each.handle is not None for each in listed)
    for version in (3, 4):
        readers.publish(version)
        assert readers.get(0, version) == (version, readers.publisher)
        assert readers.get(1, version) == (version, readers.ids[0])
    assert readers.copies(3) == [], "copies follow the newest version"


@pytest.fixture
def readers(fleet_of_readers: ReaderFleet) -> ReaderFleet:
    """A fleet in which it pays to share copies, and version 1."""
    fleet_of_readers.follow(fan_out.FEW_HOSTS + 1)
    fleet_of_readers.publish(1)
    return fleet_of_readers


def test_a_killed_reader_is_passed_over(readers: ReaderFleet) -> None:
    """No process of its host is left that could tell the others."""
    readers.get(0, 1)
    readers.children[0].kill()
    assert readers.get(1, 1)[0] == 1.0
    assert readers.ids[0] not in {each.reader for each in readers.copies(1)}
    assert readers.get(2, 1) == (1.0, readers.ids[1])


def test_the_copy_of_a_killed_reader_is_made_anew_on_its_host(readers: ReaderFleet) -> None:
    readers.get(1, 1)
    readers.children[1].kill()
    assert readers.get(2, 1) == (1.0, readers.publisher)
    assert [each.reader for each in readers.copies(1) if each.handle is not None] == [readers.ids[2]]
    assert readers.get(0, 1) == (1.0, readers.ids[2])


def test_a_leader_whose_host_is_listed_among_the_leaders_leaves_no_request(readers: ReaderFleet) -> None:
    """Another process of its host was withdrawn from their group, and not from the group of leaders."""
    readers.get(1, 1)
    number = fan_out.group_of(readers.copies(1)[0].peer.host)
    with contextlib.closing(GroupClient(readers.store.url, readers.store.name, number)) as group:
        group.change(lambda now: fan_out.remove_readers(now, {readers.ids[1]}))
        assert readers.get(2, 1) == (1.0, readers.ids[1])
        assert group.read()[1].parts == ()


def test_a_reader_that_closes_takes_its_copies_along(readers: ReaderFleet) -> None:
    readers.get(0, 1)
    readers.children[0].tell(None)
    readers.children[0].end()
    eventually(lambda: readers.copies(1) == [])
    assert readers.get(1, 1) == (1.0, readers.publisher)


def test_a_group_removes_readers_of_this_host_whose_process_has_ended(url: str) -> None:
    here, elsewhere = liveness.this_process(), Peer("elsewhere", 2**22, 1)
    dead = Peer(here.host, 2**22, 1)
    readers = [Holder(name, peer) for name, peer in (("living", here), ("dead", dead), ("elsewhere", elsewhere))]
    with contextlib.closing(GroupClient(url, "weights", 0)) as group:
        for part, reader in enumerate(readers):
            group.change(partial(fan_out.request_copy, key=(1, part, b"d" * 16), reader=reader))

        def left() -> list[str]:
            return [copy.reader for part in group.read()[1].parts for copy in part.copies]

        group.remove_dead_readers()
        assert left() == ["living", "elsewhere"]
        group.remove_dead_readers({"elsewhere"})
        assert left() == ["living"], "its host is away"
