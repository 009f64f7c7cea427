"""Memory that processes of one host map from each other: files, and regions of a plane."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.common import shareable_memory
from holdfast.backends.common.host_plane import HostPlane
from holdfast.backends.common.process_memory import HUGE_PAGE, put_on_huge_pages
from holdfast.comms.errors import RegionGone, Unsupported
from holdfast.comms.memory_plane import memory
from holdfast.comms.system.files import touched_pages
from holdfast.comms.transport import liveness
from support.children import Child
from support.memory import needs_huge_pages, smaps_field


@pytest.mark.parametrize("regions", [1, 9, 40])
def test_memory_that_is_read_again_is_mapped_once(regions: int) -> None:
    """A reader maps each memory of its publishers once, however often they reuse it in turn."""
    with HostPlane() as owner, HostPlane() as reader, ExitStack() as opened:
        exposed = [opened.enter_context(owner.expose(owner.empty(4096, mappable=True))) for _ in range(regions)]
        mapped = [[reader.map(region.handle, lasting=False) for region in exposed] for _ in range(3)]
        first, *others = [[each.data_ptr() for each in round_] for round_ in mapped]
        assert len(set(first)) == regions
        assert others == [first, first]


def test_only_so_many_mappings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shareable_memory, "MOST_MAPPED", 3)
    with HostPlane() as owner, HostPlane() as reader, ExitStack() as opened:
        exposed = [opened.enter_context(owner.expose(owner.empty(4096, mappable=True))) for _ in range(4)]
        mapped = [reader.map(region.handle, lasting=False) for region in exposed]
        again = [reader.map(region.handle, lasting=False).data_ptr() for region in exposed[1:]]
        assert again == [each.data_ptr() for each in mapped[1:]], "the last ones are kept"
        first = reader.map(exposed[0].handle, lasting=False)
        assert first.data_ptr() != mapped[0].data_ptr(), "the oldest one was let go"


HUGE = 2 << 20


@given(
    nbytes=st.sampled_from([1, 4096, 4097, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 4097]),
    start=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    lasting=st.booleans(),
)
def test_any_part_of_any_memory_is_mapped_as_it_is(nbytes: int, start: float, lasting: bool) -> None:
    with HostPlane() as owner, HostPlane() as reader:
        memory = owner.empty(nbytes, mappable=True)
        assert memory.nbytes == nbytes
        memory.copy_((torch.arange(nbytes) * 31 >> 3).to(torch.uint8))
        part = memory[int(start * (nbytes - 1)) :]
        with owner.expose(part) as region:
            assert torch.equal(reader.map(region.handle, lasting=lasting), part)


def huge_bytes(tensor: torch.Tensor, field: str = "AnonHugePages") -> int:
    """The bytes on huge pages of the mapping that holds a tensor."""
    return int(smaps_field(tensor, field).split()[0]) << 10


# Huge pages -----------------------------------------------------------------------------------------------------------


@needs_huge_pages
def test_memory_moves_to_huge_pages_and_keeps_what_it_holds() -> None:
    tensor = torch.arange(16 << 20, dtype=torch.int32)
    put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, 10.0)
    assert huge_bytes(tensor) > 0
    assert torch.equal(tensor, torch.arange(16 << 20, dtype=torch.int32))


@needs_huge_pages
def test_memory_that_was_not_moved_in_time_stays_where_it_is() -> None:
    tensor = torch.arange(16 << 20, dtype=torch.int32)
    before = huge_bytes(tensor)
    put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, -1.0)
    assert huge_bytes(tensor) == before


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE - 1])
def test_memory_smaller_than_a_page_is_not_moved(nbytes: int) -> None:
    tensor = torch.ones(HUGE_PAGE, dtype=torch.uint8)
    put_on_huge_pages(tensor.data_ptr() + 1, nbytes, 1.0)
    assert bool((tensor == 1).all())


def huge_share() -> float:
    """The share of this process's shareable memory on huge pages, as the kernel says."""
    pages = touched_pages(os.getpid())
    assert pages is not None
    return pages.huge / pages.nbytes


@needs_huge_pages
@pytest.mark.parametrize("plane", ["shm", "inproc"])
def test_shareable_memory_that_came_on_small_pages_moves_under_its_readers(
    plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shareable_memory, "_MOVE_SLACK", -1.0)
    with memory(plane) as opened:
        tensor = opened.empty(32 << 20, mappable=True)
        assert huge_share() < 0.5
        tensor.random_()
        wanted = tensor.clone()
        with opened.expose(tensor) as region:
            mapped = opened.map(region.handle, lasting=True)
            opened.improve(tensor)
            assert huge_share() > 0.9
            assert torch.equal(tensor, wanted) and torch.equal(mapped, wanted)


def test_a_closed_plane_gives_and_moves_no_memory() -> None:
    opened = memory("shm")
    tensor = opened.empty(1 << 20, mappable=True)
    opened.close()
    for call in (lambda: opened.empty(64 << 20, mappable=True), lambda: opened.improve(tensor)):
        with pytest.raises(RegionGone, match="closed"):
            call()


def test_memory_on_huge_pages_is_mapped_with_few_faults() -> None:
    nbytes = 16 * HUGE
    with HostPlane() as owner, HostPlane() as reader:
        memory = owner.empty(nbytes, mappable=True)
        if huge_bytes(memory, "ShmemPmdMapped") < nbytes:
            pytest.skip("the kernel has no huge pages for shared memory now")
        with owner.expose(memory) as region:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            mapped = reader.map(region.handle, lasting=False)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert huge_bytes(mapped, "ShmemPmdMapped") == nbytes
        assert faults < nbytes // (16 * 4096), "pages of 4 KiB come in sixteens"


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
