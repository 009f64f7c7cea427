"""An RDMABuffer reads and writes the memory of another process, as Monarch's does, and travels by pickle."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import RegionGone, Unsupported
from holdfast.store.interop import rdma_buffer
from holdfast.store.interop.rdma_buffer import RDMABuffer
from support.source_tree import ROOT


@pytest.fixture(scope="module", autouse=True)
def plane() -> Iterator[None]:
    """The plane of a process stays open; tests look for what does."""
    yield
    rdma_buffer._plane().close()
    rdma_buffer._plane.cache_clear()


def elsewhere(buffer: RDMABuffer) -> RDMABuffer:
    """The buffer as another process gets it."""
    sent = pickle.dumps(buffer)
    assert len(sent) < 1000
    found = pickle.loads(sent)
    assert isinstance(found, RDMABuffer)
    return found


@settings(max_examples=20)
@given(size=st.integers(1, 70_000), room=st.integers(0, 100), awaited=st.booleans(), seed=st.integers(0, 99))
def test_what_is_written_elsewhere_is_here_and_the_other_way(size: int, room: int, awaited: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=random)
    before, source = memory.clone(), torch.randint(0, 255, (max(1, size - room),), dtype=torch.uint8, generator=random)
    buffer = RDMABuffer(memory)
    other, into = elsewhere(buffer), torch.full((size + room,), 7, dtype=torch.uint8)

    async def both() -> None:
        await other.read_into(into)
        await other.write_from(source)

    if awaited:
        asyncio.run(both())
    else:
        other.read_into(into).get()
        other.write_from(source).get()
    assert torch.equal(into, torch.cat([before, torch.full((room,), 7, dtype=torch.uint8)]))
    assert torch.equal(memory, torch.cat([source, before[len(source) :]]))
    buffer.drop().get()
    with pytest.raises(RegionGone):
        other.read_into(into).get()


def test_what_does_not_fit_is_refused_at_once() -> None:
    buffer = RDMABuffer(torch.zeros(8))
    assert buffer.size() == 32
    assert buffer.backend == elsewhere(buffer).backend
    for call, match in ((buffer.read_into, "dst has 28 bytes"), (buffer.write_from, "src has 36")):
        with pytest.raises(ValueError, match=match):
            call(torch.zeros(7 if call == buffer.read_into else 9))
    with pytest.raises(Unsupported, match="in the process that made it"):
        elsewhere(buffer).drop()
    buffer.drop().get()
    for wrong in (torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(0), memoryview(bytearray(4)).cast("B", (2, 2))):
        with pytest.raises(ValueError, match=r"one-dimensional|at least one byte"):
            RDMABuffer(wrong)


def test_a_memoryview_is_memory_too() -> None:
    data = bytearray(b"0123456789")
    buffer = RDMABuffer(memoryview(data))
    elsewhere(buffer).write_from(memoryview(bytearray(b"abc"))).get()
    assert data == b"abc3456789"
    buffer.drop().get()


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")
def test_actors_of_monarch_use_it_and_it_is_faster_than_monarchs_over_tcp() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "stack" / "monarch" / "rdma.py"), "16", "3"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after drop: RegionGone" in done.stdout
    times = [float(found) for found in re.findall(r": ([\d.]+) times", done.stdout)]
    assert len(times) == 2
    assert min(times) > 1.0
