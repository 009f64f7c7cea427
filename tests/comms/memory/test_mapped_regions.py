"""Processes of a host map regions whatever plane moves the bytes between hosts."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from holdfast.comms.errors import RegionGone, Unsupported
from holdfast.comms.memory_plane import memory
from holdfast.comms.transport import liveness
from support.children import Child


@pytest.fixture(params=["shm", "ucx", "nixl", "ucx over tcp", "nixl over tcp"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    plane, _, over = str(request.param).partition(" over ")
    if over:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return plane


def an_owner(pipe: Connection, name: str) -> None:
    with memory(name) as plane:
        tensor = plane.empty(1 << 20, mappable=True)
        tensor.fill_(7)
        with plane.expose(tensor[4096:]) as region, plane.expose(torch.ones(100)) as other:
            pipe.send((region.handle, other.handle))
            pipe.recv()
            pipe.send(plane.is_lent(tensor))
            pipe.recv()
        pipe.send("closed")
        pipe.recv()
        pipe.send(plane.is_lent(tensor))


def test_a_region_in_mappable_memory_is_mapped(
    name: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start(an_owner, name)
    handle, other = owner.hear()
    with memory(name) as plane:
        assert plane.can_map
        with pytest.raises(Unsupported, match="mapping"):
            plane.map(other, lasting=False)
        mapped = plane.map(handle, lasting=False)
        assert mapped.nbytes == handle.nbytes and mapped.unique().tolist() == [7]
        mapped[:10] = 1
        copy = torch.empty(handle.nbytes, dtype=torch.uint8)
        plane.read(handle, copy).wait()
        assert copy.unique().tolist() == [7], "what is written into a mapping stays in this process"
        lasting = plane.map(handle, lasting=True)
        owner.tell("look")
        assert owner.hear() is True, "the owner does not write to it anew"
        owner.tell("close")
        assert owner.hear() == "closed"
        with pytest.raises(RegionGone):
            plane.map(handle, lasting=True)
        assert lasting.unique().tolist() == [7]
        del lasting
        owner.tell("look")
        assert owner.hear() is False
        owner.end()
        with pytest.raises(RegionGone):
            plane.map(handle, lasting=False)


def test_a_region_of_another_host_is_not_mapped(
    name: str, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start(an_owner, name)
    handle, _ = owner.hear()
    monkeypatch.setenv(liveness.HOST, "elsewhere")
    liveness.this_host.cache_clear()
    try:
        with memory(name) as plane, pytest.raises(Unsupported, match="mapping"):
            plane.map(handle, lasting=False)
    finally:
        monkeypatch.undo()
        liveness.this_host.cache_clear()
    for _ in range(3):
        owner.tell("go on")
    owner.end()
