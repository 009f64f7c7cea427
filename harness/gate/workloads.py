"""The workloads of the gate: each repeats an op of holdfast's public interface.

Processes of both commits load this file by itself, so it uses only what both can have: a workload that a commit cannot
run is not compared. Times are CPU times of all ranks, which share one CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Op = Callable[[], object]
Make = Callable[[int, int, Path], Op]
"""(rank, ranks, an empty folder that they share) -> an op, done by all ranks together."""


@dataclass(frozen=True, slots=True)
class GateWorkload:
    """`ops` is a multiple of 20: how many make a slice of some milliseconds."""

    name: str
    what: str
    ranks: int
    ops: int
    make: Make


def _connect(backend: str, rank: int, ranks: int, folder: Path) -> object:
    from holdfast import comms

    return comms.connect(backend, rank=rank, size=ranks, rendezvous=(folder / backend).as_uri(), timeout=60.0)


def _reduce(backend: str, count: int, timeout: float | None = None) -> Make:
    def make(rank: int, ranks: int, folder: Path) -> Op:
        import torch

        comm, tensor = _connect(backend, rank, ranks, folder), torch.ones(count)
        all_reduce = comm.all_reduce  # type: ignore[attr-defined]
        return lambda: all_reduce(tensor, timeout=timeout)

    return make


def _sum(rank: int, ranks: int, folder: Path) -> Op:
    import torch

    from holdfast.comms.reproducible import sum_contributions

    comm, output = _connect("inproc", rank, ranks, folder), torch.empty(1 << 10)
    shards = [torch.linspace(1.0, number, 1 << 10) for number in (2.0, 3.0, 5.0)]
    return lambda: sum_contributions(comm, shards, output)  # type: ignore[arg-type]


def _window(rank: int, ranks: int, folder: Path) -> Op:
    import torch

    comm = _connect("shm", rank, ranks, folder)
    window, source = comm.window(torch.zeros(1024, dtype=torch.int64)), torch.ones(16, dtype=torch.int64)  # type: ignore[attr-defined]
    to = (rank + 1) % ranks

    def op() -> None:
        window.put(source, to, 64)
        window.fetch_add(to, 0, 1)
        window.get(source, to, 64)

    return op


def _memory(rank: int, ranks: int, folder: Path) -> Op:
    import torch

    from holdfast import comms

    plane = comms.memory("shm")
    region = plane.expose(torch.ones(16 << 10))
    into = torch.empty(16 << 10)
    return lambda: plane.read(region.handle, into).wait()


def _store(rank: int, ranks: int, folder: Path) -> Op:
    import torch

    from holdfast.store import WeightStore

    store = WeightStore(f"memory://{folder}", keep=2)
    weights, copies = {"layer": torch.ones(4096)}, {"layer": torch.empty(4096)}
    number = itertools.count(1)

    def op() -> None:
        version = next(number)
        store.publish(version, weights)
        store.get(version, into=copies)

    return op


_STATE_TENSORS = 48
"""Tensors of a mid-size state: two large ones of 1 MiB and small ones of 16 KiB, 2.7 MiB in all."""


def _mid_size_state(value: float) -> Mapping[str, object]:
    import torch

    sizes = {f"embedding{index}": 1 << 18 for index in range(2)}
    sizes |= {f"layer{index}": 1 << 12 for index in range(_STATE_TENSORS - 2)}
    return {name: torch.full((count,), value) for name, count in sizes.items()}


def _publish(rank: int, ranks: int, folder: Path) -> Op:
    from holdfast.store import WeightStore

    store, number = WeightStore(f"memory://{folder}/publish", keep=2), itertools.count(1)
    weights = _mid_size_state(1.0)
    return lambda: store.publish(next(number), weights)


def _get(rank: int, ranks: int, folder: Path) -> Op:
    from holdfast.store import WeightStore

    store = WeightStore(f"memory://{folder}/get")
    copies = _mid_size_state(0.0)
    store.publish(1, _mid_size_state(1.0))
    return lambda: store.get(1, into=copies)


def _membership(rank: int, ranks: int, folder: Path) -> Op:
    from holdfast.comms.transport.base import Peer
    from holdfast.ft.membership.events import Death, ProvenDeaths, ViewRead
    from holdfast.ft.membership.state_machine import Membership
    from holdfast.ft.membership.view import Job, Member, Timeouts, View

    members = tuple(Member(f"m{index:03}", f"127.0.0.1:{index + 1}", Peer("host", index + 1, 1)) for index in range(64))
    job = Job("job", 64, 1, 128, ("shm",), "shm")
    view = View(3, "running", members, job, "all are here")
    fresh = Membership(members[0], job, Timeouts(), frozenset({"shm"}))

    def op() -> None:
        state, _ = fresh.on(ViewRead(view), 0.0)
        for index in (63, 17, 40):
            state, _ = state.on(ProvenDeaths((Death(members[index].id, "the kernel says so"),)), 1.0)

    return op


WORKLOADS = (
    GateWorkload("call", "all_reduce of 8 B by one rank: the fast path", 1, 100, _reduce("inproc", 2)),
    GateWorkload(
        "long-way", "the same with a timeout: the way down to a transport", 1, 100, _reduce("inproc", 2, 30.0)
    ),
    GateWorkload("shm-8B", "all_reduce of 8 B over shm, 2 ranks", 2, 40, _reduce("shm", 2)),
    GateWorkload("shm-64KiB", "all_reduce of 64 KiB over shm, 2 ranks", 2, 20, _reduce("shm", 1 << 14)),
    GateWorkload("reproducible", "exact sum of three contributions of 4 KiB by one rank", 1, 20, _sum),
    GateWorkload("window", "put, fetch_add and get through a window of shm, 2 ranks", 2, 40, _window),
    GateWorkload("memory", "read of 64 KiB over the memory plane of shm", 1, 60, _memory),
    GateWorkload("store", "publish and get of a tensor of 16 KiB", 1, 20, _store),
    GateWorkload("store-publish", "publish of 48 tensors, 2.7 MiB", 1, 20, _publish),
    GateWorkload("store-get", "get of 48 tensors, 2.7 MiB, into existing ones", 1, 20, _get),
    GateWorkload("membership", "three deaths among 64 members, in the membership core", 1, 20, _membership),
)
