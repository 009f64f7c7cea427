"""torch 2.15's one-sided transport over a memory plane, found by its entry point."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, CorruptData, Mismatch, PeerFailed, RegionGone
from holdfast.harness import LocalCluster

pytestmark = pytest.mark.skipif(
    find_spec("torch.distributed._transport") is None, reason="torch has transports from 2.15 on"
)


def new_transport(**options: Any) -> Any:
    return importlib.import_module("torch.distributed._transport").new_transport("holdfast", "cpu", **options)


@pytest.mark.parametrize("plane", ["shm", "ucx"])
def test_two_processes_write_and_read_each_others_memory(plane: str) -> None:
    def body(comm: Communicator) -> list[list[float]]:
        with new_transport(plane=plane) as transport:
            exposed, source, back = torch.zeros(8), torch.arange(8.0) + comm.rank, torch.zeros(8)
            memory = transport.register_memory(exposed)
            told = comm.all_gather_object((transport.bind(), memory.to_remote_buffer().serialize()))
            url, descriptor = told[1 - comm.rank]
            assert transport.connect(url) == 0 and transport.connected()
            remote = type(memory.to_remote_buffer()).deserialize(descriptor)
            here, into = transport.register_memory(source), transport.register_memory(back)
            transport.write(here.to_view(8, 16), remote, async_op=True).wait()
            comm.barrier()
            assert transport.read(into.to_mutable_view(0, 12), remote) == 0
            asyncio.run(transport.read_async(into.to_mutable_view(12, 4), remote))
            found = back[:4].tolist()
            with pytest.raises(ValueError, match="mutable"):
                transport.read(into.to_view(), remote)
            with pytest.raises(ValueError, match="not within"):
                into.to_view(16, 17)
            comm.barrier()
            transport.unregister_memory(memory)
            transport.unregister_memory(memory)
            comm.barrier()
            with pytest.raises(RegionGone):
                transport.read(into.to_mutable_view(), remote)
            return [exposed.tolist(), found]

    with LocalCluster(2, "shm") as cluster:
        first, second = cluster.run(body)
    assert first == [[3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0, 0.0], [2.0, 3.0, 4.0, 2.0]]
    assert second == [[2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0], [3.0, 4.0, 5.0, 3.0]]


def test_memory_of_a_process_that_was_killed_is_gone() -> None:
    def body(comm: Communicator) -> str:
        transport = new_transport(plane="shm")
        memory = transport.register_memory(torch.ones(1024))
        told = comm.all_gather_object((transport.bind(), memory.to_remote_buffer().serialize()))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        transport.connect(told[1][0])
        remote = type(memory.to_remote_buffer()).deserialize(told[1][1])
        with pytest.raises(PeerFailed):
            comm.barrier()
        with pytest.raises(RegionGone):
            transport.read(memory.to_mutable_view(), remote)
        transport.close()
        return "gone"

    with LocalCluster(2, "shm") as cluster:
        assert next(outcome.value for outcome in cluster.outcomes(body)) == "gone"


def test_ends_that_do_not_fit_are_refused() -> None:
    with new_transport(plane="shm") as transport:
        memory = transport.register_memory(torch.zeros(4))
        remote = memory.to_remote_buffer()
        with pytest.raises(Mismatch, match="not connected"):
            transport.read(memory.to_mutable_view(), remote)
        with pytest.raises(CorruptData, match="URL"):
            transport.connect(b"https://elsewhere")
        with pytest.raises(Mismatch, match="plane"):
            transport.connect(b"holdfast-plane 1 other")
        with pytest.raises(ValueError, match="contiguous"):
            transport.register_memory(torch.zeros(4, 4).t())
        transport.connect(transport.bind())
        with pytest.raises(ValueError, match="bytes"):
            transport.read(transport.register_memory(torch.zeros(5)).to_mutable_view(), remote)
    for call in (transport.bind, lambda: transport.register_memory(torch.zeros(1))):
        with pytest.raises(RegionGone, match="closed"):
            call()


@given(data=st.binary(max_size=80))
def test_no_bytes_make_a_descriptor_raise_anything_but_our_error(data: bytes) -> None:
    remote = importlib.import_module("holdfast.comms.torchdist.transport").RemoteMemory
    try:
        found = remote.deserialize(data)
    except CorruptData:
        return
    assert remote.deserialize(found.serialize()) == found
