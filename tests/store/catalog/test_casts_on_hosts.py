"""Casts between hosts: fewer bytes are moved, and holders that die or stop while they pack are passed over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from holdfast.comms.memory_plane import Handle
from holdfast.comms.transport import liveness
from holdfast.comms.work import Work
from holdfast.store import WeightStore
from holdfast.store.casts import cast_reader
from holdfast.store.casts.wire_cast import CastName, EncodedTensor, WireCast
from holdfast.store.errors import CastUnavailable
from support.children import Child
from support.waiting import eventually

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
