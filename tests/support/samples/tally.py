"""A job that adds up numbers: the sum of all steps and shards is known, whatever fails meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
    session: Session, steps: int = STEPS, pause: float = 0.01, gate: str = "", hurry: str = ""
) -> dict[str, Any]:
    """Add up; returns what this process has at the end.

    Waits in step 3 until the file `gate` is there; once the file `hurry` is there, steps have no pauses.
    """
    tally, epochs = Tally(), []
    session.attach("tally", tally)
    for attempt in session.steps(steps):
        with attempt:
            time.sleep(0.0 if hurry and Path(hurry).exists() else pause)
            while attempt.step == 3 and gate and not Path(gate).exists():
                time.sleep(0.005)
            part = torch.full((5,), sum((attempt.step + 1) * (shard + 1) for shard in attempt.shards)).double()
            attempt.comm.all_reduce(part)
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
    assert check([event_of(event) for event in job.events()]) == []


def cluster(size: int, backend: str = "shm", spares: int = 0, fault: str = "", **session: Any) -> LocalCluster:
    options = {"timeouts": QUICK, "shards": SHARDS, **session}
    environ = {"HOLDFAST_FAULT": fault} if fault else {}
    return LocalCluster(size, backend, spares=spares, environ=environ, session=options)
