"""Readers that serve readers: what source each is assigned, and how a version spreads over many hosts."""

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

from holdfast.comms.errors import CorruptData
from holdfast.comms.transport import liveness
from holdfast.comms.transport.base import Peer
from holdfast.store import WeightStore
from holdfast.store.catalog import fan_out, fleet
from holdfast.store.catalog.client import GroupClient
from holdfast.store.catalog.fan_out import (
    AT_ONCE,
    COPIES,
    FEW_HOSTS,
    GROUPS,
    LEAD,
    LEADERS,
    GroupPart,
    ReaderGroup,
    ServingCopy,
    announce_copy,
    group_of,
    remove_readers,
    request_copy,
    withdraw_copy,
)
from holdfast.store.catalog.records import Catalog, Holder, Reader
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.part_source import PartSource, sources_for
from support.children import Start
from support.mutations import damages, mutated
from support.samples.store_processes import move_to_host
from support.waiting import eventually
from support.weights.catalogs import DIGEST, replica, shard

KEY = (1, 0, DIGEST)
SEEDS = ("north", "south")


def reader(number: int, host: str = "") -> Holder:
    return Holder(f"reader{number}", Peer(host or f"host{number}", 1000 + number, 1), leaving=True)


def requested(group: ReaderGroup, *readers: Holder, seeds: Sequence[str] = SEEDS) -> ReaderGroup:
    for each in readers:
        group = request_copy(group, KEY, each, seeds)
    return group


def announced(group: ReaderGroup, *readers: Holder) -> ReaderGroup:
    for each in readers:
        group = announce_copy(group, KEY, each.id, replica(each.id).handle)
    return group


def sources(group: ReaderGroup) -> dict[str, str]:
    """The source of each reader that waits or reads."""
    return {each.reader: each.source for each in group.part(KEY).copies if each.handle is None}


def test_the_first_readers_read_from_replicas_or_elsewhere_and_the_next_from_them() -> None:
    readers = [reader(number) for number in range(6)]
    group = requested(ReaderGroup(), *readers)
    assert sorted(sources(group).values()) == ["", "", "", "", "north", "south"], "one reader of each at a time"
    first = [each for each in readers if sources(group)[each.id]]
    group = announced(group, first[0])
    assert sorted(sources(group).values())[:3] == ["", "", ""] and first[0].id in sources(group).values()
    leader, other, third = (reader(number) for number in (1, 2, 3))
    group = requested(ReaderGroup(), leader, other, third, seeds=[LEAD])
    assert sources(group) == {leader.id: LEAD, other.id: "", third.id: ""}
    assert sources(announced(group, leader)) == {other.id: leader.id, third.id: ""}, "one at a time"


def test_a_host_asks_for_one_copy_and_their_number_is_bounded() -> None:
    once = requested(ReaderGroup(), reader(1, "west"))
    assert requested(once, reader(2, "west")) is once, "another process of that host is at it"
    copies = tuple(ServingCopy(each.id, each.peer) for each in map(reader, range(COPIES - 1)))
    group = requested(ReaderGroup(parts=(GroupPart(KEY, SEEDS, copies),)), reader(COPIES), reader(COPIES + 1))
    assert len(group.part(KEY).copies) == COPIES


def test_a_group_forgets_the_version_before() -> None:
    one, two, newer = reader(1), reader(2), (2, 0, b"y" * 16)
    group = announced(requested(ReaderGroup(), one, two, seeds=[LEAD]), one)
    assert {each.key for each in request_copy(group, newer, one).parts} == {KEY, newer}, "a reader still reads it"
    assert {each.key for each in request_copy(announced(group, two), newer, one).parts} == {newer}


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
def test_no_source_serves_more_than_its_share_and_no_free_source_is_left_idle(
    steps: list[tuple[str, int]], seeds: tuple[str, ...]
) -> None:
    group = ReaderGroup()
    for step, number in steps:
        who = reader(number)
        before = {each.reader: each for each in group.part(KEY).copies}
        if step == "ask":
            group = requested(group, who, seeds=seeds)
        elif step == "announce" and sources(group).get(who.id):
            group = announced(group, who)
        elif step == "withdraw":
            group = withdraw_copy(group, KEY, who.id)
        elif step in ("close", "die"):
            group = remove_readers(group, {who.id if step == "close" else who.peer})
        copies = group.part(KEY).copies
        assert step in ("ask", "announce") or who.id not in {each.reader for each in copies}
        complete = {each.reader for each in copies if each.handle is not None}
        load = Counter(each.source for each in copies if each.handle is None and each.source)
        assert set(load) <= complete | set(seeds) and all(count <= AT_ONCE for count in load.values())
        if any(each.handle is None and not each.source for each in copies):
            assert all(load[each] == AT_ONCE for each in complete)
            assert len(complete) + load.total() >= len(seeds)
        for each in copies:  # a reader keeps its source as long as that is there
            known = before.get(each.reader)
            if known is not None and known.source in complete | set(seeds) and each.handle is None:
                assert each.source == known.source


def test_hosts_are_spread_over_groups() -> None:
    sizes = Counter(group_of(f"host {number}") for number in range(GROUPS * 40))
    assert len(sizes) == GROUPS and max(sizes.values()) < 80


@given(damages)
def test_a_damaged_group_is_read_as_a_group_or_refused(damage: tuple[str, int, int]) -> None:
    group = announced(requested(ReaderGroup(), reader(1), reader(2)), reader(1))
    assert ReaderGroup.decode(group.encode()) == group
    (damaged,) = mutated([group.encode()], *damage)
    try:
        assert isinstance(ReaderGroup.decode(damaged), ReaderGroup)
    except CorruptData:
        assert damaged != group.encode()


SIZE = 1 << 18


def a_reader(pipe: Connection, url: str, host: str) -> None:
    """Get the versions that the pipe asks for, on a host.

    Sends the id of its store, then for each version the value and the store it came from.
    """
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
    group = group_of(f"{liveness.this_host()}/{first}")
    return first, next(each for each in others if (group_of(f"{liveness.this_host()}/{each}") == group) == in_one_group)


class Fleet:
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

    def copies(self, version: int) -> list[ServingCopy]:
        """The copies that leaders have of a version."""
        with contextlib.closing(GroupClient(self.store.url, self.store.name, LEADERS)) as group:
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
) -> Iterator[Fleet]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    found = Fleet(url, start, request.param)
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
        found.store.close()


@pytest.mark.parametrize("fleet_of_readers", [True, False], ids=["one group", "two groups"], indirect=True)
def test_the_first_reader_reads_from_the_publisher_and_serves_the_next(fleet_of_readers: Fleet) -> None:
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS)
    readers.publish(1)
    assert readers.get(0, 1) == readers.get(1, 1) == (1.0, readers.publisher), "few read straight from the replicas"
    assert readers.copies(1) == []
    readers.follow(FEW_HOSTS + 1)
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
def readers(fleet_of_readers: Fleet) -> Fleet:
    """A fleet in which it pays to share copies, and version 1."""
    fleet_of_readers.follow(FEW_HOSTS + 1)
    fleet_of_readers.publish(1)
    return fleet_of_readers


def test_a_killed_reader_is_passed_over(readers: Fleet) -> None:
    """No process of its host is left that could tell the others."""
    readers.get(0, 1)
    readers.children[0].kill()
    assert readers.get(1, 1)[0] == 1.0
    assert readers.ids[0] not in {each.reader for each in readers.copies(1)}
    assert readers.get(2, 1) == (1.0, readers.ids[1])


def test_the_copy_of_a_killed_reader_is_made_anew_on_its_host(readers: Fleet) -> None:
    readers.get(1, 1)
    readers.children[1].kill()
    assert readers.get(2, 1) == (1.0, readers.publisher)
    assert [each.reader for each in readers.copies(1) if each.handle is not None] == [readers.ids[2]]
    assert readers.get(0, 1) == (1.0, readers.ids[2])


def test_a_leader_whose_host_is_listed_among_the_leaders_leaves_no_request(readers: Fleet) -> None:
    """Another process of its host was withdrawn from their group, and not from the group of leaders."""
    readers.get(1, 1)
    number = group_of(readers.copies(1)[0].peer.host)
    with contextlib.closing(GroupClient(readers.store.url, readers.store.name, number)) as group:
        group.change(lambda now: remove_readers(now, {readers.ids[1]}))
        assert readers.get(2, 1) == (1.0, readers.ids[1])
        assert group.read()[1].parts == ()


def test_a_reader_that_closes_takes_its_copies_along(readers: Fleet) -> None:
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
            group.change(partial(request_copy, key=(1, part, b"d" * 16), reader=reader))

        def left() -> list[str]:
            return [copy.reader for part in group.read()[1].parts for copy in part.copies]

        group.remove_dead_readers()
        assert left() == ["living", "elsewhere"]
        group.remove_dead_readers({"elsewhere"})
        assert left() == ["living"], "its host is away"
