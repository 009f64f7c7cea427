"""holdfast ignores torch's global settings: default device and dtype, determinism, inference mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, ReduceOp
from holdfast.ft import Session
from holdfast.store import WeightStore
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks_of
from support.samples.tally import assert_exact, cluster, start_with_spares, tally_up

CPU = torch.device("cpu")


def tally_up_under_other_settings(session: Session, gate: str) -> dict[str, Any]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    return tally_up(session, gate=gate)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_a_whole_session_runs_under_another_default_device_and_dtype(backend: str) -> None:
    with cluster(2, backend, spares=1, fault="commit.before_prepare:5:1:3") as ranks:
        job = start_with_spares(ranks, tally_up_under_other_settings)
        assert_exact(job, job.results(), 2)


def every_op(comm: Communicator) -> None:
    """Run one op of every kind on known numbers."""
    peer, ones = 1 - comm.rank, torch.ones(8, device=CPU)
    for count in (8, 100_000):
        for op in COLLECTIVES:
            collective(op, comm.rank, 2, count, root=1).run(comm)
        given = torch.full((count,), comm.rank + 1.0, device=CPU)
        comm.all_reduce(given, reproducible=count == 8)
        comm.all_reduce(given[::2], ReduceOp.MAX)
        comm.all_to_all_single(given, given, [count // 2] * 2, [count // 2] * 2)
        comm.all_reduce(given, async_op=True).wait()
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.broadcast_object([1, "two"], 0) == [1, "two"]
    if comm.backend != "gloo":
        with comm.window(torch.zeros(8, device=CPU)) as window:
            comm.barrier()
            window.put(ones, peer)
            comm.barrier()
            window.get(torch.empty(8, device=CPU), peer)
            comm.barrier()


@contextmanager
def set_by(call: Callable[[Any], object], value: object, default: object) -> Iterator[None]:
    call(value)
    yield
    call(default)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "default dtype": lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: set_by(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks_of("two_ranks")
def test_every_op_runs_under_every_setting(comm: Communicator, setting: str) -> None:
    with SETTINGS[setting]():
        every_op(comm)
        comm.barrier()  # threads share the setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_planes_and_the_store_run_under_every_setting(setting: str) -> None:
    with SETTINGS[setting]():
        weights = {"weight": torch.ones(8, device=CPU), "large": torch.ones(1 << 18, device=CPU)}
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        with comms.memory("shm") as plane, plane.expose(weights["weight"], writable=True) as region:
            plane.write(region.handle, weights["weight"]).wait()
            plane.read(region.handle, into["weight"]).wait()
        with WeightStore("memory://") as store:
            store.publish(1, weights)
            store.get("latest", into)
        assert all(torch.equal(into[name], weights[name]) for name in weights)
