"""Which holder packs which cast: pure transitions of the catalogue."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store.catalog import transitions
from holdfast.store.catalog.part_casts import (
    announce_cast,
    bytes_to_cast,
    casts_listed,
    casts_to_make,
    decline_cast,
    request_cast,
)
from holdfast.store.catalog.records import CastForm, Catalog, Holder, Replica, Shard

DIGEST = b"d" * 16
HOLDERS = [Holder(name, Peer(f"host {name}", 100 + number, 1)) for number, name in enumerate("abc")]


def handle(holder: str) -> Handle:
    return Handle("shm", holder.encode(), 1000)


@pytest.fixture
def catalog() -> Catalog:
    """Version 1, of which three holders have the only part."""
    found = Catalog(holders=tuple(HOLDERS))
    shard = Shard(0, DIGEST, 960, "a", (Replica("a", handle("a")),))
    found = transitions.announce(found, 1, shard, parts=1, replicas=3, keep=2, fence=None)
    for name in "bc":
        found = transitions.replicated(found, 1, 0, DIGEST, Replica(name, handle(name)))
    assert found.latest == 1
    return found


def asked(catalog: Catalog, cast: str = "bf16", *, anew: bool = True) -> Catalog:
    return request_cast(catalog, 1, 0, DIGEST, cast, anew=anew)


def form(catalog: Catalog, cast: str = "bf16") -> CastForm:
    shard = catalog.shard(1, 0)
    found = None if shard is None else shard.cast(cast)
    assert found is not None
    return found


def packed(catalog: Catalog, maker: str) -> CastForm:
    return CastForm("bf16", maker, b"f" * 16, 400, handle(f"form of {maker}"))


def test_one_holder_is_asked_once(catalog: Catalog) -> None:
    once = asked(catalog)
    assert form(once).maker in "abc" and form(once).handle is None
    assert asked(once) == asked(once, anew=False) == once
    (made,) = casts_to_make(once, form(once).maker)
    assert made[2] == form(once) and bytes_to_cast(once, form(once).maker) == 1000
    assert Catalog.decode(once.encode()) == once


def test_casts_of_one_part_are_asked_for_apart(catalog: Catalog) -> None:
    both = asked(asked(catalog, "fp8"), "bf16")
    shard = both.shard(1, 0)
    assert shard is not None and [each.cast for each in shard.casts] == ["bf16", "fp8"]


def test_other_bytes_and_other_versions_are_not_asked_for(catalog: Catalog) -> None:
    assert request_cast(catalog, 1, 0, b"other", "bf16", anew=True) == catalog
    assert request_cast(catalog, 2, 0, DIGEST, "bf16", anew=True) == catalog
    assert request_cast(catalog, 1, 1, DIGEST, "bf16", anew=True) == catalog


def test_only_the_holder_that_was_asked_lists_a_form(catalog: Catalog) -> None:
    now = asked(catalog)
    maker = form(now).maker
    other = next(each for each in "abc" if each != maker)
    assert announce_cast(now, 1, 0, DIGEST, packed(now, other)) == now
    listed = announce_cast(now, 1, 0, DIGEST, packed(now, maker))
    assert form(listed) == packed(now, maker)
    assert [each[2] for each in casts_listed(listed, maker)] == [packed(now, maker)]
    assert announce_cast(listed, 1, 0, DIGEST, replace(packed(now, maker), digest=b"g")) == listed


def test_holders_that_decline_are_asked_in_turn_and_then_anew(catalog: Catalog) -> None:
    now, makers = asked(catalog), []
    while form(now).maker:
        makers.append(form(now).maker)
        now = decline_cast(now, 1, 0, form(now), "no room")
    assert sorted(makers) == ["a", "b", "c"]
    assert form(now).declined == tuple((maker, "no room") for maker in makers)
    assert asked(now, anew=False) == now
    assert form(asked(now)).maker == makers[0]


def test_a_late_complaint_changes_nothing(catalog: Catalog) -> None:
    """Another form of that holder, or one of another holder, is there by now."""
    first = asked(catalog)
    listed = announce_cast(first, 1, 0, DIGEST, packed(first, form(first).maker))
    assert decline_cast(listed, 1, 0, form(first), "slow") == listed
    second = decline_cast(listed, 1, 0, form(listed), "wrong bytes")
    assert form(second).maker != form(first).maker
    assert decline_cast(second, 1, 0, form(listed), "wrong bytes") == second


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_another_holder_packs_when_one_goes(catalog: Catalog, how: str) -> None:
    now = asked(catalog)
    gone = next(each for each in HOLDERS if each.id == form(now).maker)
    now = transitions.remove_dead_holders(now, {gone.peer}) if how == "dies" else transitions.leave(now, gone.id)
    assert form(now).maker in {"a", "b", "c"} - {gone.id}


def test_a_form_goes_with_the_replica_of_its_holder_and_with_its_version(catalog: Catalog) -> None:
    now = asked(catalog)
    maker = next(each for each in HOLDERS if each.id == form(now).maker)
    listed = announce_cast(now, 1, 0, DIGEST, packed(now, maker.id))
    left = transitions.remove_dead_holders(listed, {maker.peer}).shard(1, 0)
    assert left is not None and left.casts == ()
    staying = transitions.leave(listed, maker.id).shard(1, 0)
    assert staying is not None and staying.casts == (packed(now, maker.id),)
    assert list(casts_listed(transitions.delete(listed, 1), maker.id)) == []
