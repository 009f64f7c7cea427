"""Readers that serve readers: what a source is assigned, and how a version spreads over many hosts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import CorruptData
from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import fan_out, transitions
from holdfast.store.catalog.fan_out import (
    ABOVE,
    AT_ONCE,
    COPIES,
    GROUPS,
    SEEDS,
    ReaderGroup,
    announce_copy,
    assigned,
    copy_on,
    group_of,
    request_copy,
    source_of,
    sources_for,
    withdraw_copy,
)
from holdfast.store.catalog.records import Catalog, Holder, Replica, ServingCopy, Shard, Version
from support.mutations import mutated

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
    catalog = transitions.announce(catalog, number, shard, parts=1, replicas=len(holders), keep=2, fence=None)
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


def test_a_group_of_another_release_is_refused() -> None:
    with pytest.raises(CorruptData, match="layout 99"):
        ReaderGroup.decode(ReaderGroup(layout=99).encode())
