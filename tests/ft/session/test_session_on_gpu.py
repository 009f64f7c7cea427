"""Sessions over `nccl` on a GPU: survivors go on after a kill, and a spare gets the state.

All ranks share GPU 0. NCCL refuses that unless each says that it is on another host; so it connects them by sockets.
"""

from __future__ import annotations

import pytest
import torch

from holdfast.ft import Timeouts
from holdfast.harness import LocalCluster
from support.samples.tally import SHARDS, assert_exact, tally_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(240),
]

GPU = "cuda:0"
PATIENT = Timeouts(heartbeat=0.1, suspect=1.0, operation=30.0, rebuild=30.0, join=60.0)
STEPS = 20


def gpu_cluster(size: int, spares: int = 0) -> LocalCluster:
    options = {"timeouts": PATIENT, "shards": SHARDS, "device": GPU}
    return LocalCluster(size, "nccl", spares=spares, timeout=120.0, device=GPU, session=options)


def test_gpu_survivors_go_on_over_nccl_without_a_killed_rank() -> None:
    with gpu_cluster(3) as ranks:
        job = ranks.start(tally_up, STEPS, device=GPU)
        job.wait_for("committed", step=5)
        job.kill(1)
        results = job.results()
        assert_exact(job, results, 2, STEPS)
    assert {result["size"] for result in results} == {2}


def test_gpu_a_spare_takes_over_with_the_state_that_is_on_the_gpu() -> None:
    with gpu_cluster(2, spares=1) as ranks:
        job = ranks.start(tally_up, 60, device=GPU)
        job.wait_for_spares()
        job.wait_for("committed", step=5)
        job.kill(1)
        results = job.results()
        assert_exact(job, results, 2, 60)
