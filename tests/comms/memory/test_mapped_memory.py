"""Mappings of the memory of other processes: right for any size, cheap on huge pages, kept for the next read."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.common import shareable_memory
from holdfast.backends.common.host_plane import HostPlane


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


def huge_bytes(address: int) -> int:
    """The bytes on huge pages of the mapping at an address."""
    entries = Path("/proc/self/smaps").read_text().split(f"{address:x}-", 1)[1].splitlines()
    return next(int(line.split()[1]) << 10 for line in entries if line.startswith("ShmemPmdMapped:"))


def test_memory_on_huge_pages_is_mapped_with_few_faults() -> None:
    nbytes = 16 * HUGE
    with HostPlane() as owner, HostPlane() as reader:
        memory = owner.empty(nbytes, mappable=True)
        if huge_bytes(memory.data_ptr()) < nbytes:
            pytest.skip("the kernel has no huge pages for shared memory now")
        with owner.expose(memory) as region:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            mapped = reader.map(region.handle, lasting=False)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert huge_bytes(mapped.data_ptr()) == nbytes
        assert faults < nbytes // (16 * 4096), "pages of 4 KiB come in sixteens"
