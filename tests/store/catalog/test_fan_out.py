"""Readers that serve readers: what source each is assigned, and how a version spreads over many hosts."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport import liveness
from holdfast.comms.transport.base import Peer
from holdfast.store import WeightStore
from holdfast.store.catalog import fan_out, fleet, transitions
from holdfast.store.catalog.client import GroupClient
from holdfast.store.catalog.fan_out import (
    ABOVE,
    AT_ONCE,
    COPIES,
    FEW_HOSTS,
    GROUPS,
    SEEDS,
    ReaderGroup,
    announce_copy,
    assigned,
    copy_on,
    group_of,
    request_copy,
    source_of,
    withdraw_copy,
)
from holdfast.store.catalog.records import Catalog, Holder, Reader, Replica, ServingCopy, Shard, Version
from holdfast.store.data.manifest import Manifest
from holdfast.store.read.part_source import PartSource, sources_for
from support.children import Child
from support.mutations import mutated
from support.waiting import eventually

DIGEST = b"x" * 16


def handle(name: str) -> Handle:
    return Handle("ucx", name.encode(), 100)


def reader(number: int, host: str = "") -> Holder:
    return Holder(f"reader{number}", Peer(host or f"host{number}", 1000 + number, 1), leaving=True)


def published(*holders: str, number: int = 1, catalog: Catalog | None = None) -> Catalog:
    """A catalogue with a version that these holders keep, each on the host of its name."""
    catalog = catalog or Catalog()
    for name in holders:
        catalog = transitions.join(catalog, Holder(name, Peer(name, 1, 1)))
    shard = Shard(0, DIGEST, 50, holders[0], (Replica(holders[0], handle(holders[0])),))
    catalog = transitions.announce(catalog, Version(number, 1, len(holders), None, False, ()), shard, 2)
    for name in holders[1:]:
        catalog = transitions.replicated(catalog, number, 0, DIGEST, Replica(name, handle(name)))
    return catalog


def requested(catalog: Catalog, *readers: Holder) -> Catalog:
    for each in readers:
        catalog = request_copy(catalog, 1, 0, DIGEST, each)
    return catalog


def announced(catalog: Catalog, *readers: Holder) -> Catalog:
    for each in readers:
        catalog = announce_copy(catalog, 1, 0, DIGEST, each.id, handle(each.id))
    return catalog


def parts_of(catalog: Catalog) -> tuple[Version, Shard]:
    version = catalog.version(1)
    assert version is not None
    return version, version.shards[0]


def sources(catalog: Catalog) -> dict[str, str]:
    """The source of each reader that waits or reads."""
    return {each.reader: each.source for each in parts_of(catalog)[1].copies if each.handle is None}


def test_the_first_readers_read_from_replicas_and_the_next_from_them() -> None:
    readers = [reader(number) for number in range(6)]
    catalog = requested(published("north", "south"), *readers)
    assert sorted(sources(catalog).values()) == ["", "", "", "", "north", "south"], "one reader of each at a time"
    first = [each for each in readers if sources(catalog)[each.id]]
    catalog = announced(catalog, first[0])
    assert Counter(sources(catalog).values())[first[0].id] == 1
    assert len([each for each in sources(catalog).values() if each]) == 3, "of two replicas and one copy"


def test_a_reader_whose_source_is_gone_is_assigned_another() -> None:
    one, two = reader(1), reader(2)
    catalog = requested(announced(requested(published("north"), one), one), two)
    catalog = withdraw_copy(catalog, 1, 0, one.id)
    assert sources(catalog) == {two.id: "north"}
    catalog = requested(announced(catalog, two), one)
    gone = transitions.remove_dead_holders(catalog, {two.peer})
    assert sources(gone) == {one.id: "north"} and two.id not in {each.id for each in gone.holders}


def test_a_reader_whose_source_drops_its_replica_is_assigned_another() -> None:
    waiting = requested(published("a", "b"), reader(1))
    (source,) = sources(waiting).values()
    left = transitions.drop_replica(waiting, 1, 0, source)
    assert sources(left) == {"reader1": "b" if source == "a" else "a"}


def test_a_reader_that_dies_frees_its_source() -> None:
    one, two = reader(1), reader(2)
    catalog = requested(published("north"), one, two)
    assert sources(catalog) == {one.id: "north", two.id: ""}
    assert sources(transitions.remove_dead_holders(catalog, {one.peer})) == {two.id: "north"}


def test_a_host_that_has_a_part_needs_no_copy() -> None:
    catalog = published("north", "south")
    assert requested(catalog, reader(1, "north")) == catalog
    once = requested(catalog, reader(1, "west"))
    assert requested(once, reader(2, "west")) == once, "another process of that host is at it"


def test_copies_do_not_count_for_safety() -> None:
    one = reader(1)
    catalog = announced(requested(published("north"), one), one)
    catalog = transitions.remove_dead_holders(catalog, {Peer("north", 1, 1)})
    assert catalog.visible() == () and catalog.lost == (1,)


def test_copies_of_an_old_version_go_when_no_reader_waits_for_them() -> None:
    one, two = reader(1), reader(2)
    catalog = requested(announced(requested(published("north"), one), one), two)
    catalog = published("north", number=2, catalog=catalog)
    assert sources(catalog) == {two.id: one.id}, "it goes on reading the version that it reads"
    assert requested(catalog, reader(3)) == catalog
    assert parts_of(announced(catalog, two))[1].copies == ()


def test_the_number_of_copies_is_bounded() -> None:
    catalog = requested(published("north"), *(reader(number) for number in range(COPIES + 5)))
    assert len(parts_of(catalog)[1].copies) == COPIES


def test_a_reader_tries_its_own_memory_then_its_host_then_its_source() -> None:
    mine, mate, other = reader(1, "west"), reader(2, "west"), reader(3, "east")
    catalog = requested(published("north", "south"), other)
    version, shard = parts_of(announced(catalog, other))
    shard_with_copies = Shard(
        0, DIGEST, 50, "north", shard.replicas, copies=(*shard.copies, ServingCopy(mate.id, handle=handle(mate.id)))
    )
    holders = (*catalog.holders, mate, mine)
    here = Catalog(holders=holders, latest=1, versions=(version,))
    found = [each.holder for each in sources_for(here, version, shard_with_copies, mine)]
    assert found[0] == mate.id and set(found) == {"north", "south", mate.id, other.id}
    reading = requested(announced(requested(published("north", "south"), other), other), mine)
    version, shard = parts_of(reading)
    assert sources_for(reading, version, shard, mine)[0].holder == sources(reading)[mine.id]


def test_readers_without_an_assigned_source_spread_over_all() -> None:
    version, shard = parts_of(published("a", "b", "c", "d"))
    catalog = published("a", "b", "c", "d")
    first = Counter(sources_for(catalog, version, shard, reader(number))[0].holder for number in range(200))
    assert set(first) == {"a", "b", "c", "d"} and max(first.values()) < 100


@given(
    steps=st.lists(st.tuples(st.sampled_from(["ask", "announce", "withdraw"]), st.integers(0, 9)), max_size=60),
    seeds=st.sets(st.sampled_from(["p", "q"])),
    first=st.integers(1, SEEDS),
)
def test_no_source_serves_more_than_its_share_and_no_free_source_is_left_idle(
    steps: list[tuple[str, int]], seeds: set[str], first: int
) -> None:
    copies: tuple[ServingCopy, ...] = ()
    for step, number in steps:
        name = f"reader{number}"
        mine = next((each for each in copies if each.reader == name), None)
        before = {each.reader: each for each in copies}
        if step == "ask" and mine is None:
            copies = (*copies, ServingCopy(name))
        elif step == "announce" and mine is not None and mine.source:
            copies = tuple(ServingCopy(name, handle=handle(name)) if each is mine else each for each in copies)
        elif step == "withdraw":
            copies = tuple(each for each in copies if each.reader != name)
        copies = assigned(copies, seeds, first)
        assert assigned(copies, seeds, first) == copies
        complete = {each.reader for each in copies if each.handle is not None}
        load = Counter(each.source for each in copies if each.handle is None and each.source)
        assert set(load) <= complete | seeds and all(count <= AT_ONCE for count in load.values())
        begun = len(complete) + load.total()
        if any(each.handle is None and not each.source for each in copies):
            assert all(load[each] == AT_ONCE for each in complete)
            assert begun >= first or all(load[each] == AT_ONCE for each in seeds)
        for each in copies:  # a reader keeps its source as long as that is there
            known = before.get(each.reader)
            if known is not None and known.source in complete | seeds and each.handle is None:
                assert each.source == known.source


# -- groups of hosts


def asked(group: ReaderGroup, *readers: Holder) -> ReaderGroup:
    for each in readers:
        group = fan_out.request_in_group(group, 1, 0, DIGEST, each)
    return group


def source(group: ReaderGroup, who: Holder) -> Replica | str | None:
    return source_of(group.part(1, 0, DIGEST), who.id)


def test_one_reader_of_a_group_asks_above_and_serves_the_others() -> None:
    leader, other, third = reader(1), reader(2), reader(3)
    group = asked(ReaderGroup(), leader, other, third)
    assert (source(group, leader), source(group, other), source(group, reader(9))) == (ABOVE, "", None)
    group = fan_out.announce_in_group(group, 1, 0, DIGEST, leader.id, handle("copy"))
    assert source(group, other) == Replica(leader.id, handle("copy"))
    assert source(group, third) == "", "one at a time"
    assert copy_on(group, group.part(1, 0, DIGEST), "host1") == Replica(leader.id, handle("copy"))
    assert copy_on(group, group.part(1, 0, DIGEST), "host2") is None


@pytest.mark.parametrize("how", ["withdraws", "dies"])
def test_if_the_leader_gives_up_the_next_reader_leads(how: str) -> None:
    leader, other = reader(1), reader(2)
    group = asked(ReaderGroup(), leader, other)
    if how == "dies":
        group = fan_out.remove_readers(group, {leader.id})
    else:
        group = fan_out.withdraw_in_group(group, 1, 0, DIGEST, leader.id)
    assert source(group, other) == ABOVE


def test_a_group_forgets_the_version_before() -> None:
    one, two = reader(1), reader(2)
    group = fan_out.announce_in_group(asked(ReaderGroup(), one, two), 1, 0, DIGEST, one.id, handle("1"))
    later = fan_out.request_in_group(group, 2, 0, b"y" * 16, one)
    assert {each.number for each in later.parts} == {1, 2}, "a reader still reads version 1"
    group = fan_out.announce_in_group(group, 1, 0, DIGEST, two.id, handle("2"))
    later = fan_out.request_in_group(group, 2, 0, b"y" * 16, one)
    assert {each.number for each in later.parts} == {2}


def test_hosts_are_spread_over_groups() -> None:
    sizes = Counter(group_of(f"host {number}") for number in range(GROUPS * 40))
    assert len(sizes) == GROUPS and max(sizes.values()) < 80


@given(
    where=st.integers(0, 10_000), what=st.integers(0, 255), kind=st.sampled_from(["flip", "cut", "remove", "insert"])
)
def test_a_damaged_group_is_read_as_a_group_or_refused(where: int, what: int, kind: str) -> None:
    group = asked(ReaderGroup(), reader(1), reader(2))
    group = fan_out.announce_in_group(group, 1, 0, DIGEST, "reader1", handle("1"))
    assert ReaderGroup.decode(group.encode()) == group
    (damaged,) = mutated([group.encode()], kind, where, what)
    try:
        assert isinstance(ReaderGroup.decode(damaged), ReaderGroup)
    except CorruptData:
        assert damaged != group.encode()


SIZE = 1 << 18


def a_reader(pipe: Connection, url: str, host: str) -> None:
    """Get the versions that the pipe asks for, on a host.

    Sends the id of its store, then for each version the value and the store it came from.
    """
    os.environ.update({liveness.HOST: host, "UCX_TLS": "tcp,self"})
    liveness.this_host.cache_clear()
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

    def __init__(self, url: str, start: Callable[..., Child], in_one_group: bool) -> None:
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

    def copies(self, version: int) -> tuple[ServingCopy, ...]:
        shard = self.store._catalog_client.read()[1].shard(version, 0)
        assert shard is not None
        return shard.copies

    def follow(self, hosts: int) -> None:
        """Let followers on so many other hosts be known, so that it pays to share copies."""
        for number in range(hosts):
            peer = Peer(f"other host {number}", 1000 + number, 1)
            reader = Reader(f"reader {number}", "token", "", peer, switched=False)
            self.store._catalog_client.change(lambda now, each=reader: fleet.register(now, each))


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["one group", "two groups"])
def fleet_of_readers(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
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
    assert readers.copies(1) == ()
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
    assert readers.copies(3) == (), "copies follow the newest version"


def test_a_killed_reader_is_passed_over(fleet_of_readers: Fleet) -> None:
    """No process of its host is left that could tell the others."""
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS + 1)
    readers.publish(1)
    readers.get(0, 1)
    readers.children[0].kill()
    assert readers.get(1, 1)[0] == 1.0
    assert readers.ids[0] not in {each.reader for each in readers.copies(1)}
    assert readers.get(2, 1) == (1.0, readers.ids[1])


def test_a_reader_that_closes_takes_its_copies_along(fleet_of_readers: Fleet) -> None:
    readers = fleet_of_readers
    readers.follow(FEW_HOSTS + 1)
    readers.publish(1)
    readers.get(0, 1)
    readers.children[0].tell(None)
    readers.children[0].end()
    eventually(lambda: readers.copies(1) == ())
    assert readers.get(1, 1) == (1.0, readers.publisher)


def test_a_group_removes_readers_of_this_host_whose_process_has_ended(url: str) -> None:
    here, elsewhere = liveness.this_process(), Peer("elsewhere", 2**22, 1)
    dead = Peer(here.host, 2**22, 1)
    readers = [Holder(name, peer) for name, peer in (("living", here), ("dead", dead), ("elsewhere", elsewhere))]
    with contextlib.closing(GroupClient(url, "weights", here.host)) as groups:
        for part, reader in enumerate(readers):
            groups.change(
                lambda now, part=part, reader=reader: fan_out.request_in_group(now, 1, part, b"d" * 16, reader)
            )
        _, group = groups.remove_dead_readers()
        assert [reader.id for reader in group.readers] == ["living", "elsewhere"]
        assert [copy.reader for part in group.parts for copy in part.copies] == ["living", "elsewhere"]
