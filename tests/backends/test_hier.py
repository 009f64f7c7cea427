"""Hierarchical collectives: shared memory or NCCL within a host, another transport between hosts.

Hosts are simulated: each rank says on which it is before it connects. NCCL is its stand-in, with host memory, and where
there is a GPU (`-m gpu`) NCCL itself, with all ranks on that GPU. The conformance kit checks the backends on one host,
where they are shared memory alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.backends.hier.choice import WITHIN_DEVICES, Choice, HostLayout
from holdfast.backends.hier.plugin import layered
from holdfast.backends.hier.transport import HierarchicalTransport, StreamedHierarchy, connect
from holdfast.backends.nccl import stand_in
from holdfast.comms import Communicator, HoldfastError, PeerFailed, ReduceOp, Revoked, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import BackendInfo, Unavailable, hookimpl
from holdfast.comms.transport.base import Context, Link, Peer
from holdfast.comms.transport.liveness import HOST, this_host
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import wait_for_files

OVER_NCCL = f"hier-{stand_in.NAME}"


class LayersOverStandIn:
    """A plugin: `hier-nccl` with the stand-in in NCCL's place, on both layers."""

    @hookimpl
    def holdfast_backends(self) -> list[BackendInfo]:
        return [layered(stand_in.NAME, stand_in.NAME, "cpu")]


def device_of(backend: str) -> str:
    return "cuda" if backend == "hier-nccl" else "cpu"


def on_hosts(comm: Communicator, hosts: Sequence[int], backend: str, meeting: str, **options: Any) -> Communicator:
    """Connect the ranks anew, each on its host. NCCL refuses two ranks on one GPU unless they are on hosts of it."""
    os.environ[HOST] = f"host{hosts[comm.rank]}"
    os.environ["NCCL_HOSTID"] = f"rank-{comm.rank}"
    this_host.cache_clear()
    if backend == OVER_NCCL and backend not in registry().backends:
        comms.register(stand_in)
        comms.register(LayersOverStandIn())
    return comms.connect(
        backend,
        rank=comm.rank,
        size=comm.size,
        rendezvous=f"file://{meeting}",
        name="hosts",
        device=device_of(backend),
        **options,
    )


def always_in_layers(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let no cost speak for the flat transport, in this process unless `replace` takes it back."""

    def in_layers(self: Choice, op: str, nbytes: int, root: int = 0) -> bool:
        return self.layout.even or op in ("all_reduce", "broadcast")

    replace(Choice, "in_layers", in_layers)


LAYOUTS = {
    "two hosts of two": [0, 0, 1, 1],
    "ranks in turns": [0, 1, 0, 1],
    "hosts of three and one": [0, 0, 0, 1],
    "one host": [0, 0, 0, 0],
    "a host a rank": [0, 1, 2, 3],
    "three hosts": [0, 1, 2, 0],
}


def sums_and_moves(comm: Communicator, hosts: list[int], backend: str, meeting: str) -> list[bytes]:
    bits = []
    always_in_layers()
    slow = {"megabits": 1}  # so that a broadcast goes in segments
    with torch.device(device_of(backend)), on_hosts(comm, hosts, backend, meeting, hints=slow) as whole:
        for count in (0, 1, 7, 30_000) if device_of(backend) == "cpu" else (7, 30_000):
            rows = torch.stack([torch.arange(count) % 5 + float(r + 1) for r in range(whole.size)])
            mine = rows[whole.rank]
            sums = {ReduceOp.SUM: rows.sum(0), ReduceOp.AVG: rows.mean(0), ReduceOp.MAX: rows.amax(0)}
            if backend != OVER_NCCL or isinstance(whole.transport, HierarchicalTransport):  # gloo has no such sum
                sums[ReduceOp.premul_sum(0.5)] = rows.sum(0) / 2
            for op, expected in sums.items():
                tensor = mine.clone()
                whole.all_reduce(tensor, op)
                assert torch.equal(tensor, expected)
            random = torch.Generator("cpu").manual_seed(whole.rank)
            uneven = torch.rand(count, generator=random, device="cpu").to(device_of(backend))
            whole.all_reduce(uneven, async_op=True).wait()
            bits.append(uneven.cpu().numpy().tobytes())
            for src in range(whole.size):
                tensor = mine.clone()
                whole.broadcast(tensor, src)
                assert torch.equal(tensor, rows[src])
            gathered = torch.empty(whole.size, count)
            whole.all_gather_single(gathered, mine)
            assert torch.equal(gathered, rows)
            part = torch.empty(count)
            whole.reduce_scatter_single(part, torch.cat([mine + r for r in range(whole.size)]), ReduceOp.AVG)
            assert torch.equal(part, rows.mean(0) + whole.rank)
            lists = [torch.empty(r * count) for r in range(whole.size)]
            whole.all_gather(lists, torch.full((whole.rank * count,), float(whole.rank)))
            assert all(torch.equal(each, torch.full_like(each, float(r))) for r, each in enumerate(lists))
        numbers = torch.tensor([whole.rank - 7])
        whole.all_reduce(numbers, ReduceOp.AVG)
        assert numbers.item() == -5, "-22 / 4, towards zero"
        if backend in ("hier-gloo", "hier-ucx"):
            exposed, right = torch.full((whole.size,), -1), (whole.rank + 1) % whole.size
            with whole.window(exposed) as window:
                window.put(torch.tensor([whole.rank]), right, whole.rank)
                window.signal(right)
                window.wait_signal((whole.rank - 1) % whole.size)
                assert exposed[whole.rank - 1].item() == (whole.rank - 1) % whole.size
                whole.barrier()
    return bits


ON_GPU = pytest.param(
    "hier-nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
        pytest.mark.timeout(150),
    ],
)
THOROUGH = [pytest.param(name, marks=pytest.mark.thorough) for name in ("hier-ucx", OVER_NCCL)]


@pytest.mark.parametrize("backend", ["hier-gloo", *THOROUGH, ON_GPU])
def test_results_are_right_and_equal_on_all_ranks_whatever_the_hosts(backend: str, tmp_path: Path) -> None:
    on_cpu = device_of(backend) == "cpu"  # four processes take turns on a GPU: one layout, with all parts
    layouts = LAYOUTS if on_cpu else {"two hosts of two": LAYOUTS["two hosts of two"]}
    environ = {} if on_cpu else {"HOLDFAST_CHECK": "0"}  # its comparisons wait for the GPU in each op
    with LocalCluster(4, "gloo", timeout=90.0, environ=environ) as cluster:
        for number, hosts in enumerate(layouts.values()):
            bits = cluster.run(sums_and_moves, hosts, backend, str(tmp_path / str(number)))
            assert all(each == bits[0] for each in bits)


def parts(comm: Communicator, hosts: list[int], meeting: str) -> tuple[str, bool]:
    with on_hosts(comm, hosts, "hier-gloo", meeting) as whole:
        transport = whole.transport
        layered = isinstance(transport, HierarchicalTransport) and transport._in_layers("all_reduce", 16 << 20)
        return type(transport).__name__, layered


def test_one_host_is_shared_memory_and_single_ranks_are_the_outer_transport(tmp_path: Path) -> None:
    with LocalCluster(4, "gloo") as cluster:
        found = {
            name: cluster.run(parts, hosts, str(tmp_path / name.replace(" ", "-")))[0]
            for name, hosts in LAYOUTS.items()
        }
    assert found["one host"] == ("ShmTransport", False)
    assert found["a host a rank"] == ("GlooTransport", False)
    assert all(found[name][0] == "HierarchicalTransport" for name in list(LAYOUTS)[:3])
    assert found["ranks in turns"][1], "each byte of a flat ring would leave the host"


def test_a_layout_follows_from_the_hosts_of_the_peers() -> None:
    layout = HostLayout.of([Peer(host, 1, 1) for host in ("b", "a", "b", "a", "b")])
    assert layout.hosts == ((0, 2, 4), (1, 3)) and layout.place(3) == (1, 1)
    assert layout.rails == 2 and not layout.even and layout.layered
    assert layout.as_neighbours.hosts == ((0, 1, 2), (3, 4))
    assert not HostLayout.of([Peer("a", 1, 1)] * 3).layered
    assert not HostLayout.of([Peer(host, 1, 1) for host in "abc"]).layered


def die_and_rebuild(comm: Communicator, hosts: list[int], backend: str, meeting: str, folder: str) -> None:
    files = Path(folder)
    always_in_layers()
    torch.set_default_device(device_of(backend))
    whole = on_hosts(comm, hosts, backend, meeting, timeout=20.0)
    peers = whole.peers
    whole.barrier()
    (files / f"in {comm.rank}").touch()
    if comm.rank == 1:
        wait_for_files(*(files / f"in {rank}" for rank in (0, 2, 3)))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            whole.all_reduce(torch.ones(300_000))
    except (PeerFailed, Revoked) as error:
        (files / f"error {comm.rank}").write_text(str(error))
    survivors = [0, 2, 3]
    store = dist.FileStore(str(files / "store"), -1)
    store.set_timeout(timedelta(seconds=20))
    again = comms.connect_members(
        backend,
        comms.KnownMembers(
            rank=survivors.index(comm.rank),
            peers=[peers[rank] for rank in survivors],
            store=store,
            epoch=1,
            previous=whole,
        ),
        device=device_of(backend),
        timeout=20.0,
    )
    whole.close()
    tensor = torch.full((300_000,), comm.rank + 1.0)
    again.all_reduce(tensor)
    (files / f"sum {comm.rank}").write_text(str(tensor.unique().tolist()))
    again.barrier()
    again.close()


@pytest.mark.parametrize("backend", ["hier-gloo", pytest.param(OVER_NCCL, marks=pytest.mark.thorough), ON_GPU])
def test_a_killed_rank_ends_the_ops_of_all_hosts_and_the_others_rebuild(backend: str, tmp_path: Path) -> None:
    """Gloo does not know which process of another host closed a connection; the same host has the kernel's word."""
    environ = {"HOLDFAST_CHECK": "0"}  # the comparison of ops would be another place to die in
    cluster = LocalCluster(4, "gloo", timeout=30.0, grace=20.0, environ=environ)
    with cluster, pytest.raises(HoldfastError):
        cluster.run(die_and_rebuild, LAYOUTS["two hosts of two"], backend, str(tmp_path / "meeting"), str(tmp_path))
    assert "rank 1" in (tmp_path / "error 0").read_text()
    for rank in (0, 2, 3):
        assert (tmp_path / f"sum {rank}").read_text() == "[8.0]"


def test_nccl_in_layers_is_for_gpus_and_says_which_layers_lack_one() -> None:
    known = registry().backend("hier-nccl")
    assert set(known.info.capabilities.moves) == {"cuda"} and not known.info.capabilities.windows
    if not torch.cuda.is_available():
        assert isinstance(known.status, Unavailable) and known.status.reason.startswith("nccl: ")
    peer = [Peer("a", 1, 1)] * 2
    context = Context(0, 2, "hosts", 0, torch.device("cpu"), dist.HashStore(), tuple(peer), 0.0)
    with pytest.raises(Unsupported, match="hier-nccl on cpu; hier-nccl is for GPUs"):
        connect("nccl", "nccl", context)


def test_ops_of_a_device_are_launched_on_its_stream_with_all_their_layers() -> None:
    launched: list[str] = []
    flat = SimpleNamespace(device=torch.device("cuda", 0), streams=True)
    flat.launch = lambda name, op: launched.append(name) or op()
    layout = HostLayout(((0, 1), (2, 3)))
    context = Context(0, 4, "hosts", 0, torch.device("cuda"), dist.HashStore(), (), 0.0)
    choice = Choice("nccl", layout, Link(15e-6, 20e9), WITHIN_DEVICES, 20e9)
    transport = StreamedHierarchy(context, layout, cast(Any, flat), None, None, choice)
    transport.launch("all_reduce", lambda: launched.append("inside"))
    assert launched == ["all_reduce", "inside"]
    assert (transport.streams, transport.device) == (True, flat.device)


class Layer:
    """A transport whose ops fail once it was aborted, with ranks of its own."""

    size, streams, ended = 2, True, None

    def __init__(self) -> None:
        self.device, self.errors = torch.device("cuda", 0), list[HoldfastError]()

    def abort(self, error: HoldfastError) -> None:
        self.errors.append(error)

    def all_reduce(self, *arguments: Any) -> None:
        if self.errors:
            raise PeerFailed((0,), "this rank has left it")

    reduce_scatter = all_gather = all_reduce


def test_the_layers_of_a_device_end_when_the_flat_transport_finds_a_rank_of_another_layer_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 has no layer in common with rank 1. It queued ops for 20 s, since no rank of its own layers had died."""
    always_in_layers(monkeypatch.setattr)
    flat, inner, rail = (cast(Any, Layer()) for _ in range(3))
    peers = tuple(Peer(host, 1, 1) for host in "aabb")
    context = Context(2, 4, "hosts", 0, torch.device("cuda"), dist.HashStore(), peers, 0.0)
    choice = Choice("nccl", HostLayout.of(peers), Link(15e-6, 20e9), WITHIN_DEVICES, None)
    transport = StreamedHierarchy(context, HostLayout.of(peers), flat, inner, rail, choice)
    transport.all_reduce(torch.ones(8), ReduceOp.SUM, 0.0)
    flat.ended = PeerFailed((1,), "the kernel says that the process is gone")
    flat.on_end(flat.ended)
    assert inner.errors == rail.errors == [flat.ended], "what they have queued ends, too"
    with pytest.raises(PeerFailed) as caught:
        transport.all_reduce(torch.ones(8), ReduceOp.SUM, 0.0)
    assert caught.value.ranks == (1,)
