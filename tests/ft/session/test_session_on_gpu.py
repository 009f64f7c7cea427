"""Sessions over `nccl` on a GPU: survivors go on after a kill, and a spare gets the state.

All ranks share GPU 0. NCCL refuses that unless each says that it is on another host; so it connects them by sockets.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from holdfast.comms.reproducible import sum_contributions
from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster
from support.samples.tally import SHARDS, Tally, assert_exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(240),
]

GPU = torch.device("cuda", 0)
PATIENT = Timeouts(heartbeat=0.1, suspect=1.0, operation=30.0, rebuild=30.0, join=60.0)
STEPS = 20


def sum_on_gpu(session: Session, steps: int = STEPS) -> dict[str, Any]:
    """As `tally_up`, with all tensors on the GPU, the state's too."""
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    tally, epochs = Tally(total=torch.zeros(5, dtype=torch.float64, device=GPU)), []
    session.attach("tally", tally)
    for attempt in session.steps(steps):
        with attempt:
            parts = [
                torch.full((5,), float((attempt.step + 1) * (shard + 1)), dtype=torch.float64, device=GPU)
                for shard in attempt.shards
            ]
            part = torch.empty(5, dtype=torch.float64, device=GPU)
            sum_contributions(attempt.comm, parts, part)
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


def gpu_cluster(size: int, spares: int = 0) -> LocalCluster:
    options = {"timeouts": PATIENT, "shards": SHARDS, "device": "cuda:0"}
    return LocalCluster(size, "nccl", spares=spares, timeout=120.0, device="cuda:0", session=options)


def test_gpu_survivors_go_on_over_nccl_without_a_killed_rank() -> None:
    with gpu_cluster(3) as ranks:
        job = ranks.start(sum_on_gpu)
        job.wait_for("committed", step=5)
        job.kill(1)
        results = job.results()
        assert_exact(job, results, 2, STEPS)
    assert {result["size"] for result in results} == {2}


def test_gpu_a_spare_takes_over_with_the_state_that_is_on_the_gpu() -> None:
    with gpu_cluster(2, spares=1) as ranks:
        job = ranks.start(sum_on_gpu, 60)
        job.wait_for_spares()
        job.wait_for("committed", step=5)
        job.kill(1)
        results = job.results()
        assert_exact(job, results, 2, 60)
