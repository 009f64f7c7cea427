"""One-sided access by torch's own functions: windows of a process group, and torch 2.15's transport over a plane."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, CorruptData, Mismatch, PeerFailed, RegionGone, Unsupported
from support.comms.ranks import on_ranks, second_tier
from support.comms.torch_groups import on_each_rank_of, shared_groups

two = shared_groups(2, "shm", "gloo", *second_tier("ucx", "mpi"))


@on_each_rank_of("two")
def test_a_put_signals_and_a_window_is_registered_again(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    assert group.supports_window
    peer, exposed, later = 1 - rank, torch.full((8,), -1.0), torch.zeros(3, 2)
    halves = [-1.0] * 4 + [1.0] * 4, [0.0] * 4 + [-1.0] * 4
    window = group.new_window(exposed)
    window.put(torch.full((4,), float(rank)), peer, 4 * rank, False).wait()
    window.wait_signal(peer, True).wait()
    got = torch.empty(8)
    window.get(got, peer, 0, True).wait()
    window.signal(peer)
    window.wait_signal(peer)  # the peer has read what this rank holds
    assert (exposed.tolist(), got.tolist()) == (halves[rank], halves[peer])
    with pytest.raises(ValueError, match="7"):
        window.put(torch.ones(2), peer, 7, False)
    window.tensor_deregister()
    with pytest.raises(RegionGone):
        window.put(torch.ones(1), peer, 0, False)
    window.tensor_register(later, owning=False)
    window.put(torch.ones(3, 2) * (rank + 1), peer, 0, True).wait()
    window.wait_signal(peer, False).wait()
    dist.barrier()
    window.close()
    assert later.view(-1).tolist() == [peer + 1.0] * 6


@on_each_rank_of("two")
def test_a_mapped_tensor_is_the_peers_own_or_is_refused_by_name(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    exposed = torch.zeros(2, 2)
    window = group.new_window(exposed)
    mapped = window.info.access == "mapped"
    window.map_remote_tensor(rank)[0, 0] = 7.0
    if mapped:
        window.map_remote_tensor(1 - rank)[1, 0] = 40.0 + rank
    else:
        with pytest.raises(Unsupported, match="map"):
            window.map_remote_tensor(1 - rank)
    if hasattr(torch._C._distributed_c10d, "WindowAttr"):
        assert window.get_attr(1 - rank).access_type.name == ("UNIFIED" if mapped else "SEPARATE")
    else:
        with pytest.raises(Unsupported, match="get_attr"):
            window.get_attr(1 - rank)
    dist.barrier()
    window.close()
    assert exposed.view(-1).tolist() == [7.0, 0.0, 41.0 - rank if mapped else 0.0, 0.0]


TRANSPORTS = pytest.mark.skipif(
    find_spec("torch.distributed._transport") is None, reason="torch has transports from 2.15 on"
)


def new_transport(**options: Any) -> Any:
    return importlib.import_module("torch.distributed._transport").new_transport("holdfast", "cpu", **options)


@TRANSPORTS
@pytest.mark.parametrize("plane", ["shm", "ucx"])
@on_ranks(2, "shm")
def test_two_processes_write_and_read_each_others_memory(comm: Communicator, plane: str) -> None:
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
        first = 3.0 - comm.rank
        assert exposed.tolist() == [first, first + 1, first + 2, first + 3, 0.0, 0.0, 0.0, 0.0]
        assert transport.read(into.to_mutable_view(0, 12), remote) == 0
        asyncio.run(transport.read_async(into.to_mutable_view(12, 4), remote))
        first = 2.0 + comm.rank
        assert back[:4].tolist() == [first, first + 1, first + 2, first]
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


@TRANSPORTS
@on_ranks(2, "shm", killed=(1,))
def test_memory_of_a_process_that_was_killed_is_gone(comm: Communicator) -> None:
    with new_transport(plane="shm") as transport:
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


@TRANSPORTS
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


@TRANSPORTS
@given(data=st.binary(max_size=80))
def test_no_bytes_make_a_descriptor_raise_anything_but_our_error(data: bytes) -> None:
    remote = importlib.import_module("holdfast.comms.torchdist.transport").RemoteMemory
    try:
        found = remote.deserialize(data)
    except CorruptData:
        return
    assert remote.deserialize(found.serialize()) == found
