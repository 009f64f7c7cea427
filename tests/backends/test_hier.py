"""Hierarchical collectives: shared memory or NCCL within a host, another transport between hosts.

Hosts are simulated: each rank says on which it is before it connects. NCCL is its stand-in, with host memory, and where
there is a GPU (`-m gpu`) NCCL itself, with all ranks on that GPU. The conformance kit checks the backends on one host,
where they are shared memory alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.backends.hier.choice import OPS, WITHIN, WITHIN_DEVICES, Choice, HostLayout
from holdfast.backends.hier.plugin import layered
from holdfast.backends.hier.transport import HierarchicalTransport, StreamedHierarchy, connect
from holdfast.comms import Communicator, HoldfastError, PeerFailed, ReduceOp, Revoked, Unsupported
from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.plugins.registry import registry
from holdfast.comms.plugins.spec import Unavailable, hookimpl
from holdfast.comms.transport.base import Context, Link, Peer
from holdfast.comms.transport.liveness import HOST, this_host
from holdfast.harness import LocalCluster, RankDied
from holdfast.harness.conformance.helpers import wait_for_files
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.netns import EnterNamespace, Network
from support.comms import nccl_stand_in as stand_in
from support.comms.ranks import second_tier

OVER_NCCL = f"hier-{stand_in.NAME}"


def device_of(backend: str) -> str:
    return "cuda" if backend == "hier-nccl" else "cpu"


def on_hosts(comm: Communicator, hosts: Sequence[int], backend: str, meeting: str, **options: Any) -> Communicator:
    """Connect the ranks anew, each on its host. NCCL refuses two ranks on one GPU unless they are on hosts of it."""
    os.environ[HOST] = f"host{hosts[comm.rank]}"
    os.environ["NCCL_HOSTID"] = f"rank-{comm.rank}"
    this_host.cache_clear()
    if backend == OVER_NCCL and backend not in registry().backends:
        comms.register(stand_in)
        both_layers = layered(stand_in.NAME, stand_in.NAME, "cpu")
        comms.register(SimpleNamespace(holdfast_backends=hookimpl(lambda: [both_layers])))
    options |= {"rank": comm.rank, "size": comm.size, "rendezvous": f"file://{meeting}", "device": device_of(backend)}
    return comms.connect(backend, name="hosts", **options)


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


def sums_and_moves(comm: Communicator, hosts: list[int], backend: str, meeting: str) -> tuple[str, list[bytes]]:
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
        large = torch.tensor([100] * 8, dtype=torch.int8), torch.tensor([60_000.0] * 8, dtype=torch.float16)
        for each in large if backend != OVER_NCCL else ():  # on a CPU they are premultiplied sums, which its gloo lacks
            average, part = each.clone(), torch.empty_like(each)
            whole.all_reduce(average, ReduceOp.AVG)
            whole.reduce_scatter_single(part, torch.cat([each] * whole.size), ReduceOp.AVG)
            assert torch.equal(average, each) and torch.equal(part, each)
        if backend in ("hier-gloo", "hier-ucx"):
            exposed, right = torch.full((whole.size,), -1), (whole.rank + 1) % whole.size
            with whole.window(exposed) as window:
                window.put(torch.tensor([whole.rank]), right, whole.rank)
                window.signal(right)
                window.wait_signal((whole.rank - 1) % whole.size)
                assert exposed[whole.rank - 1].item() == (whole.rank - 1) % whole.size
                whole.barrier()
        return type(whole.transport).__name__, bits


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ON_GPU = pytest.param("hier-nccl", marks=[pytest.mark.gpu, NO_GPU])


@pytest.mark.parametrize("backend", ["hier-gloo", *second_tier("hier-ucx", OVER_NCCL), ON_GPU])
def test_results_are_right_and_equal_on_all_ranks_whatever_the_hosts(backend: str, tmp_path: Path) -> None:
    on_cpu = device_of(backend) == "cpu"  # four processes take turns on a GPU: one layout, with all parts
    layouts = LAYOUTS if on_cpu else {"two hosts of two": LAYOUTS["two hosts of two"]}
    environ = {} if on_cpu else {"HOLDFAST_CHECK": "0"}  # its comparisons wait for the GPU in each op
    with LocalCluster(4, "gloo", timeout=90.0, environ=environ) as cluster:
        kinds = {}
        for number, (name, hosts) in enumerate(layouts.items()):
            (kinds[name], bits), *others = cluster.run(sums_and_moves, hosts, backend, str(tmp_path / str(number)))
            assert all(other == (kinds[name], bits) for other in others)
    if backend == "hier-gloo":
        assert (kinds.pop("one host"), kinds.pop("a host a rank")) == ("ShmTransport", "GlooTransport")
        assert set(kinds.values()) == {"HierarchicalTransport"}


def test_a_layout_follows_from_the_hosts_of_the_peers() -> None:
    layout = HostLayout.of([Peer(host, 1, 1) for host in ("b", "a", "b", "a", "b")])
    assert layout.hosts == ((0, 2, 4), (1, 3)) and layout.place(3) == (1, 1)
    assert layout.rails == 2 and not layout.even and layout.layered
    assert layout.as_neighbours.hosts == ((0, 1, 2), (3, 4))
    assert not HostLayout.of([Peer("a", 1, 1)] * 3).layered
    assert not HostLayout.of([Peer(host, 1, 1) for host in "abc"]).layered


def die_and_rebuild(comm: Communicator, hosts: list[int], backend: str, files: Path) -> tuple[str, list[float]]:
    """Rank 1 dies; the error of another rank, and the sum of the next communicator."""
    always_in_layers()
    torch.set_default_device(device_of(backend))
    whole = on_hosts(comm, hosts, backend, str(files / "meeting"), timeout=20.0)
    peers, said = whole.peers, ""
    whole.barrier()
    (files / f"in {comm.rank}").touch()
    if comm.rank == 1:
        wait_for_files(*(files / f"in {rank}" for rank in (0, 2, 3)))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            whole.all_reduce(torch.ones(300_000))
    except (PeerFailed, Revoked) as error:
        said = str(error)
    survivors = [0, 2, 3]
    store = dist.FileStore(str(files / "store"), -1)
    store.set_timeout(timedelta(seconds=20))
    rank, others = survivors.index(comm.rank), [peers[rank] for rank in survivors]
    members = comms.KnownMembers(rank=rank, peers=others, store=store, epoch=1, previous=whole)
    again = comms.connect_members(backend, members, device=device_of(backend), timeout=20.0)
    whole.close()
    tensor = torch.full((300_000,), comm.rank + 1.0)
    again.all_reduce(tensor)
    again.barrier()
    again.close()
    return said, tensor.unique().tolist()


@pytest.mark.parametrize("backend", ["hier-gloo", *second_tier(OVER_NCCL), ON_GPU])
def test_a_killed_rank_ends_the_ops_of_all_hosts_and_the_others_rebuild(backend: str, tmp_path: Path) -> None:
    """Gloo does not know which process of another host closed a connection; the same host has the kernel's word."""
    environ = {"HOLDFAST_CHECK": "0"}  # the comparison of ops would be another place to die in
    with LocalCluster(4, "gloo", timeout=30.0, grace=20.0, environ=environ) as cluster:
        outcomes = cluster.outcomes(die_and_rebuild, LAYOUTS["two hosts of two"], backend, tmp_path)
    assert isinstance(outcomes[1].error, RankDied)
    assert "rank 1" in outcomes[0].value[0]
    assert [outcomes[rank].value[1] for rank in (0, 2, 3)] == [[8.0]] * 3


def test_nccl_in_layers_is_for_gpus_and_says_which_layers_lack_one() -> None:
    known = registry().backend("hier-nccl")
    assert set(known.info.capabilities.moves) == {"cuda"} and not known.info.capabilities.windows
    if not torch.cuda.is_available():
        assert isinstance(known.status, Unavailable) and known.status.reason.startswith("nccl: ")
    peer = [Peer("a", 1, 1)] * 2
    context = Context(0, 2, "hosts", 0, torch.device("cpu"), dist.HashStore(), tuple(peer), 0.0)
    with pytest.raises(Unsupported, match="hier-nccl on cpu; hier-nccl is for GPUs"):
        connect("nccl", "nccl", context)


def over_parts(kind: type[HierarchicalTransport], flat: Any, inner: Any, rail: Any, rank: int = 0) -> Any:
    """A transport of a rank of two hosts of two, over these parts."""
    peers = tuple(Peer(host, 1, 1) for host in "aabb")
    context = Context(rank, 4, "hosts", 0, torch.device("cuda"), dist.HashStore(), peers, 0.0)
    choice = Choice("nccl", HostLayout.of(peers), Link(15e-6, 20e9), WITHIN_DEVICES, None)
    return kind(context, HostLayout.of(peers), flat, inner, rail, choice)


def test_ops_of_a_device_are_launched_on_its_stream_and_settled_with_all_their_layers() -> None:
    happened: list[str] = []
    flat, inner, rail = (
        SimpleNamespace(settle=lambda end, name=name: happened.append(name)) for name in ("flat", "inner", "rail")
    )
    flat.device, flat.launch = torch.device("cuda", 0), lambda name, op: happened.append(name) or op()
    transport = over_parts(StreamedHierarchy, flat, inner, rail)
    transport.launch("all_reduce", lambda: happened.append("inside"))
    transport.settle(0.0)
    assert happened == ["all_reduce", "inside", "flat", "inner", "rail"]
    assert (transport.streams, transport.device) == (True, flat.device)


class EqualRanks:
    """A part of two ranks that pass the same, on host memory. It adds in the dtype of the tensors, as a device does.

    Its ops fail once it was aborted.
    """

    size, streams, device, ended = 2, True, torch.device("cpu"), None

    def __init__(self) -> None:
        self.errors: list[HoldfastError] = []

    def abort(self, error: HoldfastError) -> None:
        self.errors.append(error)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, _: float) -> None:
        if self.errors:
            raise PeerFailed((0,), "this rank has left it")
        assert op.name == "sum"
        output.copy_(inputs[0] + inputs[0])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, _: float) -> None:
        assert op.name == "sum"
        tensor += tensor.clone()

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, _: float) -> None:
        for output in outputs:
            output.copy_(tensor[: output.numel()])


def test_the_layers_of_a_device_end_when_the_flat_transport_finds_a_rank_of_another_layer_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 has no layer in common with rank 1. It queued ops for 20 s, since no rank of its own layers had died."""
    always_in_layers(monkeypatch.setattr)
    flat, inner, rail = (cast(Any, EqualRanks()) for _ in range(3))
    transport = over_parts(StreamedHierarchy, flat, inner, rail, rank=2)
    transport.all_reduce(torch.ones(8), ReduceOp.SUM, 0.0)
    flat.ended = PeerFailed((1,), "the kernel says that the process is gone")
    flat.on_end(flat.ended)
    assert inner.errors == rail.errors == [flat.ended], "what they have queued ends, too"
    with pytest.raises(PeerFailed) as caught:
        transport.all_reduce(torch.ones(8), ReduceOp.SUM, 0.0)
    assert caught.value.ranks == (1,)


class AveragesItself(EqualRanks):
    """The flat transport of the two parts: NCCL widens integers, and divides their sum."""

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, _: float) -> None:
        assert op.name == "avg" and not output.is_floating_point()
        output.copy_(inputs[0])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, _: float) -> None:
        assert op.name == "avg" and not tensor.is_floating_point()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 20_000.0),
        (torch.int8, 100),
        (torch.int32, 2_000_000_000),
        (torch.uint16, 40_000),
        (torch.uint64, 1 << 62),
        (torch.float32, 3.0),
        (torch.int64, -7),
    ],
    ids=str,
)
def test_averages_on_a_device_are_right_where_the_dtype_does_not_hold_the_sum(
    dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport gets a device's tensors as they are: of a CPU's, the communicator has widened these dtypes."""
    always_in_layers(monkeypatch.setattr)
    transport = over_parts(HierarchicalTransport, AveragesItself(), EqualRanks(), EqualRanks())
    tensor = torch.full((8,), value, dtype=dtype)
    transport.all_reduce(tensor, ReduceOp.AVG, 0.0)
    assert tensor.tolist() == [value] * 8
    part = torch.zeros(2, dtype=dtype)
    transport.reduce_scatter(part, [torch.full_like(part, value)] * 4, ReduceOp.AVG, 0.0)
    assert part.tolist() == [value] * 2


# When collectives go in layers, by the plans of messages: pure --------------------------------------------------------

TCP = Link(25e-6, 1.5e9)
MEGABIT = 1e6 / 8
MIB = 1 << 20


def choice_of(hosts: int, ranks: int, in_turns: bool, rate: float | None = None, outer: str = "gloo") -> Choice:
    """That of `ranks` ranks on each of `hosts` hosts."""
    if in_turns:
        layout = HostLayout(tuple(tuple(range(host, hosts * ranks, hosts)) for host in range(hosts)))
    else:
        layout = HostLayout(tuple(tuple(range(host * ranks, (host + 1) * ranks)) for host in range(hosts)))
    return Choice(outer, layout, TCP, WITHIN, rate)


def least(op: str, hosts: int, nbytes: float) -> float:
    """The fewest bytes that any algorithm moves over the busiest link, each way."""
    return {"all_reduce": 2 * (hosts - 1) / hosts, "broadcast": 1}.get(op, (hosts - 1) / hosts) * nbytes


@given(st.sampled_from(OPS), st.integers(2, 6), st.integers(2, 5), st.booleans(), st.sampled_from(["gloo", "ucx"]))
def test_layers_move_the_least_over_a_link_of_which_flat_moves_no_less(
    op: str, hosts: int, ranks: int, in_turns: bool, outer: str
) -> None:
    nbytes = 240 * ranks * hosts << 10  # divisible, and large enough for each pipeline
    choice = choice_of(hosts, ranks, in_turns, 100 * MEGABIT, outer)
    bound = least(op, hosts, nbytes)
    assert choice.flat(op, nbytes).link_bytes >= bound * (1 - 1e-9)
    assert choice.layers(op, nbytes).link_bytes == pytest.approx(bound)


@pytest.mark.parametrize(
    ("op", "ranks", "in_turns", "times"),
    [
        ("all_reduce", 2, False, 1.25),  # (n-1)/n over (h-1)/h, of a ring that leaves each host once
        ("all_reduce", 4, False, 1.375),
        ("all_reduce", 2, True, 2.5),  # r times that
        ("all_gather", 2, False, 1.25),
        ("all_gather", 4, True, 5.5),
        ("reduce_scatter", 2, False, 2.0),  # each rank sends each other rank its part: r times as much
        ("reduce_scatter", 4, True, 4.0),
        ("broadcast", 2, False, 4.0),  # a tree of log2 n sends, most of which leave the host
        ("broadcast", 2, True, 3.0),
    ],
)
def test_flat_ops_over_gloo_move_that_many_times_as_much(op: str, ranks: int, in_turns: bool, times: float) -> None:
    choice = choice_of(3, ranks, in_turns, 100 * MEGABIT)
    assert choice.flat(op, 12 * MIB).link_bytes / choice.layers(op, 12 * MIB).link_bytes == pytest.approx(times)


@pytest.mark.parametrize(
    ("rate", "hosts", "ranks", "in_turns", "in_layers"),
    [
        (200 * MEGABIT, 3, 2, False, {*OPS}),
        (200 * MEGABIT, 3, 4, True, {*OPS}),
        (None, 3, 2, False, set()),
        (None, 3, 2, True, {"all_reduce", "all_gather"}),
        (None, 3, 4, True, {*OPS}),
    ],
)
def test_four_mebibytes_go_in_layers_where_that_takes_less_time(
    rate: float | None, hosts: int, ranks: int, in_turns: bool, in_layers: set[str]
) -> None:
    choice = choice_of(hosts, ranks, in_turns, rate)
    assert {op for op in OPS if choice.in_layers(op, 4 * MIB)} == in_layers


def test_small_messages_and_the_ops_of_uneven_hosts_stay_flat() -> None:
    choice = choice_of(3, 2, in_turns=True)
    assert not any(choice.in_layers(op, 1024) for op in OPS)
    assert choice_of(2, 2, in_turns=True).in_layers("all_reduce", 16 * MIB), "each byte of a flat ring leaves the host"
    uneven = replace(choice, layout=HostLayout(((0, 2, 4), (1, 3))), told_rate=10 * MEGABIT)
    assert {op for op in OPS if uneven.in_layers(op, MIB)} == {"all_reduce"}
    assert uneven.layers("broadcast", MIB).link_bytes == uneven.flat("broadcast", MIB).link_bytes


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather"])
def test_the_steps_of_an_algorithm_are_those_of_its_cost(op: str, size: int) -> None:
    """`cost` says in how many messages, one after the other; a link that is only slow to answer shows it."""
    answers = Link(1.0, 1e30)
    layout = HostLayout(tuple((rank,) for rank in range(size)))
    for nbytes in (64, 8 * MIB):
        choice = Choice("ucx", layout, answers, WITHIN, None)
        costs = cost.OPS[op](answers, size, nbytes // size if op == "all_gather" else nbytes)
        assert choice.flat(op, nbytes).steps == round(min(costs.values()))


# What the interfaces of hosts carry; hosts are network namespaces ---------------------------------------------------


def link_counters() -> tuple[int, int]:
    """What the interface of this process's host has received and sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    numbers = next(line for line in lines if line.lstrip().startswith("eth0:")).partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])


def op_bytes(comm: Communicator, op: str, nbytes: int) -> int:
    """The bytes of an op on the link of this host, in the direction that has more."""
    whole, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // comm.size)
    run: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "broadcast": lambda: comm.broadcast(whole, 0),
        "all_gather": lambda: comm.all_gather_single(whole, part),
        "reduce_scatter": lambda: comm.reduce_scatter_single(part, whole),
    }
    comm.barrier()
    before = link_counters()
    run[op]()
    comm.barrier()
    return max(after - earlier for after, earlier in zip(link_counters(), before, strict=True))


@pytest.mark.thorough
@pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
@pytest.mark.parametrize("outer", ["gloo", "ucx"])
def test_the_links_of_hosts_carry_what_the_plans_say(outer: str, tmp_path: Path) -> None:
    hosts, ranks, nbytes, rate = 3, 2, 3 * MIB, 200 * MEGABIT
    names = outer, f"hier-{outer}"

    def count(comm: Communicator, entries: list[EnterNamespace]) -> dict[tuple[str, str], int]:
        entries[comm.rank // ranks]()
        os.environ["GLOO_SOCKET_IFNAME"], counts = "eth0", {}
        for name in names:
            hints = {"megabits": 200} if name.startswith("hier-") else None
            meet: dict[str, Any] = {"rank": comm.rank, "size": comm.size, "rendezvous": f"file://{tmp_path}/{name}"}
            with comms.connect(name, hints=hints, timeout=60.0, **meet) as whole:
                counts.update({(name, op): op_bytes(whole, op, nbytes) for op in OPS})
        return counts

    environ = {"HOLDFAST_CHECK": "0", "UCX_TLS": "tcp,self"}
    with Network(hosts) as network, LocalCluster(hosts * ranks, "shm", timeout=60.0, environ=environ) as cluster:
        counted = cluster.run(count, [network.entry(host) for host in range(hosts)])
    choice = choice_of(hosts, ranks, in_turns=False, rate=rate, outer=outer)
    for op in OPS:
        flat, layers = (max(counts[name, op] for counts in counted) for name in names)
        assert flat == pytest.approx(choice.flat(op, nbytes).link_bytes, rel=0.05), op
        assert layers == pytest.approx(least(op, hosts, nbytes), rel=0.05), op
