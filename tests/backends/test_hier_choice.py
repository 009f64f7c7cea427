"""When collectives go in layers, and how many bytes of them a host's link carries: pure, by the plans of messages.

The last test counts the bytes that the interfaces of hosts have carried; hosts are network namespaces.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.backends.hier.choice import OPS, WITHIN, Choice, HostLayout
from holdfast.comms import Communicator
from holdfast.comms.algorithms.message_passing import cost
from holdfast.comms.transport.base import Link
from holdfast.ft.processes.channel import ProcessChannel
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness.testbed import netns
from holdfast.harness.testbed.netns import EnterNamespace, Network

TCP = Link(25e-6, 1.5e9)
MEGABIT = 1e6 / 8
MIB = 1 << 20


def layout_of(hosts: int, ranks: int, in_turns: bool) -> HostLayout:
    """`ranks` ranks on each of `hosts` hosts."""
    if in_turns:
        return HostLayout(tuple(tuple(range(host, hosts * ranks, hosts)) for host in range(hosts)))
    return HostLayout(tuple(tuple(range(host * ranks, (host + 1) * ranks)) for host in range(hosts)))


def choice_of(hosts: int, ranks: int, in_turns: bool, rate: float | None = None, outer: str = "gloo") -> Choice:
    return Choice(outer, layout_of(hosts, ranks, in_turns), TCP, WITHIN, rate)


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


# On hosts -----------------------------------------------------------------------------------------------------------


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
def test_the_links_of_hosts_carry_what_the_plans_say(outer: str) -> None:
    hosts, ranks, nbytes, rate = 3, 2, 3 * MIB, 200 * MEGABIT
    size, names = hosts * ranks, (outer, f"hier-{outer}")

    with Network(hosts) as network, tempfile.TemporaryDirectory() as folder:

        def body_of(rank: int, entry: EnterNamespace) -> Callable[[ProcessChannel], None]:
            def body(channel: ProcessChannel) -> None:
                entry()
                counts = {}
                for name in names:
                    hints = {"megabits": 200} if name.startswith("hier-") else None
                    meeting = f"file://{folder}/{name}"
                    with comms.connect(
                        name, rank=rank, size=size, rendezvous=meeting, hints=hints, timeout=60.0
                    ) as comm:
                        counts.update({(name, op): op_bytes(comm, op, nbytes) for op in OPS})
                channel.send(counts)

            return body

        environ = {"HOLDFAST_CHECK": "0", "GLOO_SOCKET_IFNAME": "eth0", "UCX_TLS": "tcp,self"}
        processes = [
            zygote().spawn(
                body_of(rank, network.entry(rank // ranks)),
                name=f"rank {rank}",
                output=Path(folder) / f"log-{rank}",
                environ=environ,
            )
            for rank in range(size)
        ]
        try:
            counted = [process.channel.recv(60.0) for process in processes]
        finally:
            for process in processes:
                process.close()
    choice = choice_of(hosts, ranks, in_turns=False, rate=rate, outer=outer)
    for op in OPS:
        flat, layers = (max(counts[name, op] for counts in counted) for name in names)
        assert flat == pytest.approx(choice.flat(op, nbytes).link_bytes, rel=0.05), op
        assert layers == pytest.approx(least(op, hosts, nbytes), rel=0.05), op
