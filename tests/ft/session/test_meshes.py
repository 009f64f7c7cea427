"""Sharded state on a mesh of two dimensions while ranks die: HSDP, FSDP2 and tensor parallel."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.comms import HoldfastError
from holdfast.ft import Session, ShardSums, Timeouts
from holdfast.ft.processes.zygote_client import zygote
from holdfast.harness import LocalCluster
from holdfast.harness.invariants import check, event_of
from support.torch_groups import sharded_model

QUICK = Timeouts(heartbeat=0.2, suspect=2.0, operation=40.0, rebuild=20.0, join=20.0)
SHARDS = 6
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    zygote().preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint")


def replicas(size: int) -> dict[str, int]:
    """Two replicas of shards if the size allows that, else one."""
    return {"replicate": 2, "shard": size // 2} if size % 2 == 0 else {"replicate": 1, "shard": size}


def pairs(size: int) -> dict[str, int]:
    """Pairs of ranks that share each layer, if the size allows that."""
    return {"data": size // 2, "tensor": 2} if size % 2 == 0 else {"data": size, "tensor": 1}


def tensor_parallel(mesh: Any) -> dict[str, Any]:
    """Linear layers cut by columns and rows over "tensor"; these and the rest over "data"."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 12), nn.LayerNorm(12))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)}


BUILDS = {"replicate": (sharded_model, replicas, 7), "data": (tensor_parallel, pairs, 8)}


def train(
    session: Session, kind: str, kills: Mapping[int, tuple[int, ...]], gate: str, copies: int = 1, saved: str = ""
) -> dict[str, Any]:
    """Losses and final weights; `kills[step]` are the ranks of the first epoch that end in that step, all at once."""
    make, shape, width = BUILDS[kind]
    things = session.attach_sharded(make, copies=copies, mesh=shape)
    if saved:
        session.checkpoints(saved, every=2)
    first, losses, final = 0, {}, []
    for attempt in session.steps(STEPS):
        first = first or (attempt.epoch if attempt.step == 0 else -1)
        with attempt:
            while attempt.step == 1 and gate and not Path(gate).exists():
                time.sleep(0.01)
            model, optimizer = things["model"], things["optimizer"]
            sums = ShardSums(attempt, next(model.parameters()).device_mesh["data"] if kind == "data" else None)
            sums.fully_sharded(model)
            optimizer.zero_grad()
            total = 0.0
            if attempt.step in kills and attempt.epoch == first:
                attempt.comm.barrier()
                time.sleep(0.1)
                if attempt.rank in kills[attempt.step]:
                    os.kill(os.getpid(), signal.SIGKILL)
            for turn in sums.turns():
                generator = torch.Generator().manual_seed(100 * attempt.step + turn.shard)
                loss = model(torch.randn(8, width, generator=generator)).square().mean() / SHARDS
                loss.backward()
                total += loss.item() * turn.counts
            optimizer.step()
            final = [parameter.full_tensor().tolist() for parameter in model.parameters()]
        if attempt.committed:
            losses[attempt.step] = total
    return {"steps": list(losses), "weights": final}


def run(size: int, kind: str, spares: int = 0, **train_args: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results and the events of a job."""
    options = {"timeouts": QUICK, "shards": SHARDS, "size": size, "min_size": 1}
    with LocalCluster(size, "shm", spares=spares, session=options) as ranks:
        gate = ranks.logs / "gate"
        job = ranks.start(train, **{"kind": kind, "kills": {}, "gate": str(gate), **train_args})
        job.wait_for_spares()
        gate.touch()
        results, events = job.results(), job.events()
    assert check([event_of(event) for event in events]) == []
    return results, events


def sources(events: list[dict[str, Any]]) -> list[str]:
    """The sources of the state of the last epoch's ranks."""
    restored = [event for event in events if event["kind"] == "restored"]
    last = max(event["epoch"] for event in restored)
    return sorted(event["source"] for event in restored if event["epoch"] == last)


@pytest.fixture(scope="module")
def alone() -> Any:
    """The result of one rank with HSDP, which any number of ranks must reach in spite of deaths."""
    return run(1, "replicate")[0][0]["weights"]


@pytest.fixture(scope="module")
def pair() -> Any:
    """The result of two ranks that share each layer; the number of such pairs must not matter."""
    return run(2, "data")[0][0]["weights"]


def test_shards_are_restored_from_their_replicas(alone: Any) -> None:
    """Without copies and checkpoints, the dead rank's part comes from its replica. Three ranks make one replica."""
    results, events = run(4, "replicate", kills={3: (3,)}, copies=0)
    assert [result["weights"] for result in results] == [alone] * 3, "bit by bit"
    assert sources(events) == ["neighbour", "neighbour", "own"]


def test_a_spare_takes_the_place_of_a_rank_among_replicas(alone: Any) -> None:
    results, _ = run(4, "replicate", spares=1, kills={3: (0,)})
    assert [result["weights"] for result in results] == [alone] * 4


def test_a_copy_is_used_when_both_replicas_of_a_part_die(alone: Any) -> None:
    """Ranks 1 and 3 have the same part; ranks 2 and 0 keep copies of it."""
    results, events = run(4, "replicate", kills={3: (1, 3)})
    assert [result["weights"] for result in results] == [alone] * 2
    assert "checkpoint" not in sources(events)


def test_a_spare_gets_tensor_parallel_shards_back(pair: Any) -> None:
    results, events = run(4, "data", spares=1, kills={3: (2,)})
    assert [result["weights"] for result in results] == [pair] * 4
    assert sources(events).count("neighbour") == 1


def test_tensor_parallel_shards_are_redistributed_to_the_survivors(pair: Any) -> None:
    """Of each of two pairs a rank dies: one pair is left."""
    results, _ = run(4, "data", kills={3: (0, 2)})
    assert [result["weights"] for result in results] == [pair] * 2


def test_a_checkpoint_of_a_mesh_can_be_read_on_another_of_its_kind(tmp_path: Path, alone: Any) -> None:
    """Ranks 1 to 3 die at once, and with them both replicas of part 1 and its copies."""
    results, events = run(4, "replicate", kills={3: (1, 2, 3)}, copies=0, saved=str(tmp_path / "saved"))
    assert [result["weights"] for result in results] == [alone]
    assert sources(events) == ["checkpoint"]


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (3, "TypeError: mesh must be a function of the number of ranks, not int"),
        (lambda size: [size], r"TypeError: mesh\(2\) must give a dict of sizes by name"),
        (lambda size: {"a": size, "b": 2}, "ValueError: .* which is a mesh of 4 ranks"),
        (lambda size: {"a": size, "b": 0}, "ValueError: .* each size must be a whole number"),
        (lambda size: {"a": 1, "b": size}, "ValueError: copies=0, .* no two ranks have the same part"),
    ],
)
def test_a_mesh_that_cannot_work_is_refused(mesh: Any, said: str) -> None:
    def refused(session: Session) -> str:
        try:
            things = session.attach_sharded(sharded_model, copies=0, mesh=mesh)
            for attempt in session.steps(1):
                with attempt:
                    assert things["model"]
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    with LocalCluster(2, "shm", session={"timeouts": QUICK, "size": 2, "min_size": 2}) as ranks:
        for found in ranks.start(refused).results():
            assert re.match(said, found), found


def test_state_on_a_mesh_of_the_user_is_refused() -> None:
    def own(mesh: Any) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh

        return sharded_model(init_device_mesh("cpu", (2, 1), mesh_dim_names=("mine", "too")))

    def careless(session: Session) -> None:
        session.attach_sharded(own)
        for attempt in session.steps(1):
            with attempt:
                pass

    with (
        LocalCluster(2, "shm", session={"timeouts": QUICK, "size": 2, "min_size": 2}) as ranks,
        pytest.raises((HoldfastError, ValueError), match=r"lies on a mesh of \(2, 1\)"),
    ):
        ranks.start(careless).results()
