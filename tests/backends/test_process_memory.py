"""Memory that other processes read through the kernel lies on huge pages where the kernel can move it."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.backends.common import shareable_memory
from holdfast.backends.common.process_memory import HUGE_PAGE, put_on_huge_pages
from holdfast.comms.errors import RegionGone
from holdfast.comms.memory_plane import memory
from holdfast.comms.system.mappings import touched_pages
from support.memory import needs_huge_pages, smaps_field

pytestmark = needs_huge_pages


def huge_bytes(tensor: torch.Tensor) -> int:
    """The bytes on huge pages of the mapping that holds a tensor."""
    return int(smaps_field(tensor, "AnonHugePages").split()[0]) << 10


def test_memory_moves_to_huge_pages_and_keeps_what_it_holds() -> None:
    tensor = torch.arange(16 << 20, dtype=torch.int32)
    put_on_huge_pages(tensor.data_ptr(), tensor.nbytes, 10.0)
    assert huge_bytes(tensor) > 0
    assert torch.equal(tensor, torch.arange(16 << 20, dtype=torch.int32))


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


# Memory that others map -----------------------------------------------------------------------------------------------


def huge_share() -> float:
    """The share of this process's shareable memory on huge pages, as the kernel says."""
    pages = touched_pages(os.getpid())
    assert pages is not None
    return pages.huge / pages.nbytes


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
