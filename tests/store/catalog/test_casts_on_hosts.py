"""Which holder packs which cast, and casts between hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport.base import Peer
from holdfast.store import WeightStore
from holdfast.store.casts import cast_reader
from holdfast.store.casts.wire_cast import CastName, EncodedTensor, WireCast
from holdfast.store.catalog import transitions
from holdfast.store.catalog.part_casts import announce_cast, casts_of, request_cast, withdraw_cast
from holdfast.store.catalog.records import CastForm, Catalog, Holder
from support.children import Child
from support.samples.store_processes import count_reads, move_to_host
from support.waiting import eventually
from support.weights.catalogs import DIGEST, announced, copied, joined

HOLDERS = [Holder(name, Peer(f"host {name}", 100 + number, 1)) for number, name in enumerate("abc")]


@pytest.fixture
def catalog() -> Catalog:
    """Version 1, of which three holders have the only part."""
    found = copied(announced(joined(*HOLDERS), "a", replicas=3), "b", "c")
    assert found.latest == 1
    return found


def asked(catalog: Catalog, cast: str = "bf16") -> Catalog:
    return request_cast(catalog, 1, 0, DIGEST, cast)


def form(catalog: Catalog, cast: str = "bf16") -> CastForm:
    shard = catalog.shard(1, 0)
    found = None if shard is None else shard.cast(cast)
    assert found is not None
    return found


def packed(catalog: Catalog, maker: str) -> CastForm:
    return CastForm("bf16", maker, b"f" * 16, 400, Handle("shm", maker.encode(), 1000))


def test_one_holder_is_asked_once(catalog: Catalog) -> None:
    once = asked(catalog)
    assert form(once).maker in "abc" and form(once).handle is None
    assert asked(once) == once and form(asked(once, "fp8")) == form(once)
    (made,) = casts_of(once, form(once).maker, packed=False)
    assert made[2] == form(once)
    assert Catalog.decode(once.encode()) == once


def test_what_is_not_there_is_not_asked_for(catalog: Catalog) -> None:
    for number, part, digest in ((1, 0, b"other"), (2, 0, DIGEST), (1, 1, DIGEST)):
        assert request_cast(catalog, number, part, digest, "bf16") == catalog


def test_only_the_holder_that_was_asked_lists_a_form(catalog: Catalog) -> None:
    now = asked(catalog)
    maker = form(now).maker
    other = next(each for each in "abc" if each != maker)
    assert announce_cast(now, 1, 0, DIGEST, packed(now, other)) == now
    listed = announce_cast(now, 1, 0, DIGEST, packed(now, maker))
    assert form(listed) == packed(now, maker)
    assert [each[2] for each in casts_of(listed, maker, packed=True)] == [packed(now, maker)]
    assert announce_cast(listed, 1, 0, DIGEST, replace(packed(now, maker), digest=b"g")) == listed


def test_a_form_that_is_withdrawn_is_asked_for_anew(catalog: Catalog) -> None:
    """By then another one may be there, of which the complaint says nothing."""
    first = asked(catalog)
    listed = announce_cast(first, 1, 0, DIGEST, packed(first, form(first).maker))
    assert withdraw_cast(listed, 1, 0, form(first)) == listed
    assert withdraw_cast(first, 1, 0, form(first)) == withdraw_cast(listed, 1, 0, form(listed)) == catalog
    assert asked(withdraw_cast(listed, 1, 0, form(listed))) == first


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
    assert list(casts_of(transitions.delete(listed, 1), maker.id, packed=True)) == []


VALUES = torch.randn(1 << 12, 256, generator=torch.Generator().manual_seed(1))


def a_holder(pipe: Connection, url: str) -> None:
    """Publish version 1 on another host over ucx, and pack forms of it once the pipe says so. None ends it."""
    move_to_host("south")
    may_pack, encode = threading.Event(), WireCast.encode

    def waiting(cast: WireCast, source: torch.Tensor, into: EncodedTensor) -> None:
        assert may_pack.wait(60.0)
        encode(cast, source, into)

    WireCast.encode = waiting  # type: ignore[method-assign]
    with WeightStore(url, plane="ucx", replicas=1) as store:
        store.publish(1, {"w": VALUES})
        pipe.send("published")
        while pipe.recv() is not None:
            may_pack.set()


@pytest.fixture
def holder(url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> Child:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(cast_reader, "PACK_SECONDS", 0.3)
    child = start(a_holder, url)
    assert child.hear() == "published"
    return child


@pytest.fixture
def reader(holder: Child, url: str) -> Iterator[WeightStore]:
    """A reader on another host. It does not wait long for a form."""
    with WeightStore(url, plane="ucx", hold=False, timeout=60.0) as store:
        yield store


def bytes_of(store: WeightStore, cast: CastName | None) -> tuple[int, torch.Tensor]:
    """The bytes that a get moves from another host, and what it got."""
    sizes, into = count_reads(store._plane), {"w": torch.zeros_like(VALUES)}
    store.get(1, into, cast=cast)
    return sum(sizes), into["w"]


def is_packed(store: WeightStore) -> bool:
    shard = store._catalog_client.read()[1].shard(1, 0)
    return shard is not None and all(each.handle is not None for each in shard.casts)


@pytest.mark.parametrize(("cast", "share"), [("bf16", 1 / 2), ("fp8", 1 / 4 + 1 / 256)])
def test_a_half_or_a_quarter_of_the_bytes_is_moved_between_hosts(
    holder: Child, reader: WeightStore, cast: CastName, share: float
) -> None:
    """All of them until a holder has packed it: then the reader casts what it gets, to the same bits."""
    whole, exact = bytes_of(reader, None)
    assert torch.equal(exact, VALUES)
    moved, cast_here = bytes_of(reader, cast)
    assert moved / whole == pytest.approx(1.0, rel=0.02) and not torch.equal(cast_here, VALUES)
    holder.tell("pack")
    eventually(lambda: is_packed(reader), 30.0)
    moved, found = bytes_of(reader, cast)
    assert moved / whole == pytest.approx(share, rel=0.02) and torch.equal(found, cast_here)
    holder.tell(None)
