"""A job that adds up numbers: the sum of all steps and shards is known, whatever fails meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.comms.reproducible import sum_contributions
from holdfast.comms.system.keys import create_key
from holdfast.ft import Session, Timeouts
from holdfast.ft.event_lines import event_of
from holdfast.harness import LocalCluster
from holdfast.harness.cluster.job import Job
from holdfast.harness.invariants import check

QUICK = Timeouts(heartbeat=0.1, suspect=1.0, operation=20.0, rebuild=10.0, join=15.0)
SHARDS = 12
STEPS = 40


@dataclass
class Tally:
    """The state of the job; attached, so newcomers get it."""

    total: torch.Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    steps: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total.copy_(state["total"])
        self.steps = list(state["steps"])


def tally_up(
    session: Session,
    steps: int = STEPS,
    pause: float = 0.01,
    gate: str = "",
    hurry: str = "",
    device: str = "cpu",
    gated: int | None = None,
) -> dict[str, Any]:
    """Add up; returns what this process has at the end.

    Waits in step 3 until the file `gate` is there, or runs ops in step `gated` until then; once the file `hurry` is
    there, steps have no pauses. All tensors, the state's too, are on the `device`; those of a GPU are added up
    independently of their order.
    """
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"  # NCCL refuses two ranks of one host on one GPU
    tally, epochs = Tally(torch.zeros(5, dtype=torch.float64, device=device)), []
    session.attach("tally", tally)
    for attempt in session.steps(steps):
        with attempt:
            time.sleep(0.0 if hurry and Path(hurry).exists() else pause)
            while attempt.step == 3 and gate and gated is None and not Path(gate).exists():
                time.sleep(0.005)
            is_open = torch.zeros(1)
            while attempt.step == gated and not is_open.item():
                time.sleep(0.01)
                is_open.fill_(Path(gate).exists())
                attempt.comm.all_reduce(is_open)
            numbers = [float((attempt.step + 1) * (shard + 1)) for shard in attempt.shards]
            part = torch.full((5,), sum(numbers), dtype=torch.float64, device=device)
            if device == "cpu":
                attempt.comm.all_reduce(part)
            else:
                sum_contributions(attempt.comm, [torch.full_like(part, number) for number in numbers], part)
            epochs.append(attempt.epoch)
        if attempt.committed:
            tally.total += part
            tally.steps.append(attempt.step)
    return {
        "rank": session.rank,
        "size": session.size,
        "total": tally.total.tolist(),
        "steps": tally.steps,
        "epochs": epochs,
        "pid": os.getpid(),
    }


def expected(steps: int = STEPS) -> list[float]:
    return [float(sum((s + 1) * (shard + 1) for s in range(steps) for shard in range(SHARDS)))] * 5


def assert_exact(job: Job, results: list[dict[str, Any]], ranks: int, steps: int = STEPS) -> None:
    """Check that all ranks committed every step once, and that no event breaks an invariant."""
    assert [result["rank"] for result in results] == list(range(ranks))
    for result in results:
        assert result["steps"] == list(range(steps))
        assert result["total"] == expected(steps)
    assert_invariants(job.events())


def assert_invariants(events: list[dict[str, Any]]) -> None:
    assert check([event_of(event) for event in events]) == []


def contract_in(folder: Path, **more: Any) -> dict[str, Any]:
    """The arguments of a session that joins the job of a folder, which has its key and its register."""
    key = folder / "job.key"
    if not key.exists():
        create_key(key)
    return {"job": "job", "register": f"sqlite://{folder}/job.sqlite", "key_file": key, "backend": "shm", **more}


def start_with_spares(
    ranks: LocalCluster,
    body: Callable[..., object],
    *args: Any,
    strike: Callable[[Job], object] | None = None,
    **more: Any,
) -> Job:
    """Start a job of which step 3 waits for the file `gate`, until all spares are there and `strike` has struck it."""
    gate = ranks.logs / "gate"
    job = ranks.start(body, *args, gate=str(gate), **more)
    job.wait_for_spares()
    if strike is not None:
        job.wait_for("committed", step=2)
        strike(job)
    gate.touch()
    return job


def cluster(size: int, backend: str = "shm", spares: int = 0, fault: str = "", **session: Any) -> LocalCluster:
    options = {"timeouts": QUICK, "shards": SHARDS, **session}
    environ = {"HOLDFAST_FAULT": fault} if fault else {}
    return LocalCluster(size, backend, spares=spares, environ=environ, session=options)
