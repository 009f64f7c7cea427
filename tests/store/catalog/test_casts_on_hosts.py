"""Which holder packs which cast, and casts between hosts: holders that die or stop while they pack are passed over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport import liveness
from holdfast.comms.transport.base import Peer
from holdfast.comms.work import Work
from holdfast.store import WeightStore
from holdfast.store.casts import cast_reader
from holdfast.store.casts.wire_cast import CastName, EncodedTensor, WireCast
from holdfast.store.catalog import transitions
from holdfast.store.catalog.part_casts import (
    announce_cast,
    bytes_to_cast,
    casts_listed,
    casts_to_make,
    decline_cast,
    request_cast,
)
from holdfast.store.catalog.records import CastForm, Catalog, Holder, Replica, Shard, Version
from holdfast.store.errors import CastUnavailable
from support.children import Child
from support.waiting import eventually

DIGEST = b"d" * 16
HOLDERS = [Holder(name, Peer(f"host {name}", 100 + number, 1)) for number, name in enumerate("abc")]


def handle(holder: str) -> Handle:
    return Handle("shm", holder.encode(), 1000)


@pytest.fixture
def catalog() -> Catalog:
    """Version 1, of which three holders have the only part."""
    found = Catalog(holders=tuple(HOLDERS))
    shard = Shard(0, DIGEST, 960, "a", (Replica("a", handle("a")),))
    found = transitions.announce(found, Version(1, 1, 3, None, False, ()), shard, 2)
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


SIZE = 1 << 20
"""Elements of float32."""


def a_holder(pipe: Connection, url: str, host: str, plane: str, packs_at_once: bool) -> None:
    """Hold replicas on a host ("": that of the test). Unless it packs at once, it says so, and waits to be told to."""
    os.environ.update({"UCX_TLS": "tcp,self"} | ({liveness.HOST: host} if host else {}))
    liveness.this_host.cache_clear()
    told = threading.Event()
    encode = WireCast.encode

    def waiting(cast: WireCast, source: torch.Tensor, into: EncodedTensor) -> None:
        pipe.send("packs")
        assert told.wait(60.0)
        encode(cast, source, into)

    if not packs_at_once:
        WireCast.encode = waiting  # type: ignore[method-assign]
    with WeightStore(url, plane=plane) as store:
        pipe.send(store._replica_holder.holder.id)
        while pipe.recv() is not None:
            told.set()


class Holders:
    """Two holders, a publisher that leaves its replicas to them, and a reader on a host of its own."""

    def __init__(self, url: str, start: Callable[..., Child], hosts: tuple[str, str], plane: str, packs: bool) -> None:
        self.children = [start(a_holder, url, host, plane, packs) for host in hosts]
        self.ids = [child.hear() for child in self.children]
        with WeightStore(url, plane=plane, hold=False) as publisher:
            for version in (1, 2):
                publisher.publish(version, {"w": values(version)})
        self.store = WeightStore(url, plane=plane, hold=False, timeout=60.0)

    def packing(self, besides: int | None = None) -> int:
        """Wait until a holder says that it packs; returns which."""
        others = [number for number in range(len(self.children)) if number != besides]

        def told() -> list[int]:
            return [number for number in others if self.children[number].pipe.poll()]

        eventually(lambda: bool(told()), 30.0)
        first = told()[0]
        assert self.children[first].hear() == "packs"
        return first

    def maker(self, version: int) -> int:
        """The holder that has packed a version."""
        shard = self.store._catalog_client.read()[1].shard(version, 0)
        assert shard is not None
        return self.ids.index(shard.casts[0].maker)

    def bytes_of(self, read: Callable[[], object]) -> int:
        """The bytes that a read moves from other hosts."""
        moved, plane = [], self.store._plane
        before = plane.read

        def counted(handle: Handle, into: torch.Tensor, offset: int = 0, *, timeout: float = 30.0) -> Work:
            moved.append(into.nbytes)
            return before(handle, into, offset, timeout=timeout)

        plane.read = counted  # type: ignore[method-assign]
        try:
            read()
        finally:
            del plane.read  # type: ignore[method-assign]
        return sum(moved)


def values(version: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(version)).view(-1, 256)


class Getting:
    """A get in a thread."""

    def __init__(self, store: WeightStore, version: int, cast: CastName) -> None:
        self.into, self._errors = {"w": torch.zeros(SIZE // 256, 256)}, list[Exception]()
        self._thread = threading.Thread(target=self._run, args=(store, version, cast))
        self._thread.start()

    def _run(self, store: WeightStore, version: int, cast: CastName) -> None:
        try:
            store.get(version, self.into, cast=cast)
        except Exception as error:
            self._errors.append(error)

    def end(self) -> torch.Tensor:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        if self._errors:
            raise self._errors[0]
        return self.into["w"]


@pytest.fixture
def holders(
    url: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Holders]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    options: dict[str, Any] = {"hosts": ("south", "west"), "plane": "ucx", "packs": False} | request.param
    found = Holders(url, start, **options)
    try:
        yield found
    finally:
        for child in found.children:
            child.kill()
        found.store.close()


def close(cast: CastName, version: int, found: torch.Tensor) -> bool:
    x = values(version)
    bound = x.abs() / 256 if cast == "bf16" else torch.maximum(x.abs() / 16, x.abs().max() / 2**17)
    return bool(((found - x).abs() <= bound).all()) and not torch.equal(found, x)


@pytest.mark.parametrize("holders", [{"packs": True}], ids=["packs at once"], indirect=True)
def test_a_half_or_a_quarter_of_the_bytes_is_moved_between_hosts(holders: Holders) -> None:
    into = {"w": torch.zeros(SIZE // 256, 256)}
    whole = holders.bytes_of(lambda: holders.store.get(2, into))
    assert torch.equal(into["w"], values(2))
    shares: dict[CastName, float] = {"bf16": 1 / 2, "fp8": 1 / 4 + 1 / 256}
    for cast, share in shares.items():
        moved = holders.bytes_of(lambda cast=cast: holders.store.get(2, into, cast=cast))  # type: ignore[misc]
        assert moved / whole == pytest.approx(share, rel=0.02)
        assert close(cast, 2, into["w"])


@pytest.mark.parametrize("holders", [{"packs": True, "plane": "shm", "hosts": ("", "")}], ids=["shm"], indirect=True)
def test_readers_of_one_host_get_the_same_bytes_over_shared_memory(holders: Holders) -> None:
    """A cast is what the reader asked for, although it saves nothing there."""
    into = {"w": torch.zeros(SIZE // 256, 256)}
    for cast in ("bf16", "fp8"):
        assert holders.bytes_of(lambda cast=cast: holders.store.get(2, into, cast=cast)) == 0  # type: ignore[misc]
        assert close(cast, 2, into["w"])  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize(
    "holders", [{}, {"hosts": ("south", "south")}], ids=["hosts of their own", "one host"], indirect=True
)
def test_another_holder_packs_what_one_that_dies_or_stops_has_begun(
    holders: Holders, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast_reader, "STALLED_SECONDS", 1.0)
    getting = Getting(holders.store, 2, "fp8")
    first = holders.packing()
    getattr(holders.children[first], fault)()
    second = holders.packing(besides=first)
    holders.children[second].tell("go on")
    assert close("fp8", 2, getting.end())
    assert holders.maker(2) == second
    if fault == "stop":
        holders.children[first].resume()


@pytest.mark.parametrize("holders", [{"packs": True}], ids=["packs at once"], indirect=True)
def test_a_form_whose_holder_is_killed_is_packed_by_another(holders: Holders) -> None:
    Getting(holders.store, 2, "bf16").end()
    first = holders.maker(2)
    holders.children[first].kill()
    assert close("bf16", 2, Getting(holders.store, 2, "bf16").end())
    assert holders.maker(2) != first


@pytest.mark.parametrize("holders", [{}], ids=["waits"], indirect=True)
def test_a_cast_that_is_not_packed_in_time_is_an_error_that_says_so(holders: Holders) -> None:
    into = {"w": torch.full((SIZE // 256, 256), 7.0)}
    with pytest.raises(CastUnavailable, match=r"part 0 of version 2 .* in fp8 .* has not packed it in time") as raised:
        holders.store.get(2, into, cast="fp8", timeout=1.0)
    assert raised.value.mixed == () and into["w"].unique().tolist() == [7.0]
    holders.children[holders.packing()].tell("go on")
    holders.store.get(2, into, cast="fp8")
    assert close("fp8", 2, into["w"])
