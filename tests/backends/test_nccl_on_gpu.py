"""The ends and time limits of `nccl` and `rccl` on a real GPU; `test_nccl_faults.py` has them over stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast import comms
from holdfast.backends.nccl import transport
from holdfast.comms import Communicator, HoldfastError
from holdfast.harness import LocalCluster
from support.waiting import PATIENCE

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def connected(outer: Communicator, place: str, timeout: float = 20.0, size: int = 2) -> Communicator:
    """Rank `outer.rank` of `size` on GPU 0. NCCL refuses two ranks on one GPU unless each says it is another host."""
    os.environ["NCCL_HOSTID"] = f"rank-{outer.rank}"
    library = "rccl" if torch.version.hip else "nccl"
    return comms.connect(
        library, rank=outer.rank, size=size, rendezvous=f"file://{place}", device="cuda:0", timeout=timeout
    )


@pytest.mark.gpu
@needs_a_gpu
def test_gpu_a_close_that_the_other_rank_does_not_join_is_bounded(tmp_path: Path) -> None:
    def body(outer: Communicator) -> float:
        comm = connected(outer, f"{tmp_path}/meet")
        comm.all_reduce(torch.ones(8, device="cuda:0"))
        torch.cuda.synchronize()
        if outer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        comm.close()
        return time.monotonic() - began

    with LocalCluster(2, "gloo", timeout=120.0) as cluster:
        outcome = cluster.outcomes(body)[0]
        assert outcome.error is None and outcome.value < 20


@pytest.mark.gpu
@needs_a_gpu
def test_gpu_connecting_to_a_rank_that_dies_is_bounded_and_the_next_connect_works(tmp_path: Path) -> None:
    def body(outer: Communicator) -> None:
        if outer.rank == 1:
            connect_over = transport.connect_over

            def die(*_: Any) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)

            transport.connect_over = die
            connected(outer, f"{tmp_path}/meet")
            transport.connect_over = connect_over
        began = time.monotonic()
        with pytest.raises(HoldfastError):
            connected(outer, f"{tmp_path}/meet", timeout=8.0)
        assert time.monotonic() - began < PATIENCE
        with connected(outer, f"{tmp_path}/alone", size=1) as alone:
            ones = torch.ones(4, device="cuda:0")
            alone.all_reduce(ones)
            assert ones.tolist() == [1, 1, 1, 1]

    with LocalCluster(2, "gloo", timeout=120.0) as cluster:
        outcome = cluster.outcomes(body)[0]
        assert outcome.error is None, outcome.error


@pytest.mark.gpu
@needs_a_gpu
def test_gpu_a_process_that_has_probed_can_fork_children_that_use_cuda() -> None:
    program = (
        "import os, torch\nfrom holdfast.comms.plugins.registry import registry\n"
        "print([str(registry().backend(each).status) for each in ('nccl', 'rccl')])\n"
        "child = os.fork()\nif child == 0:\n    torch.ones(2, device='cuda').sum().item()\n    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_gpu_a_tensor_of_another_gpu_is_refused() -> None:
    with LocalCluster(1, "gloo", timeout=120.0) as cluster:

        def body(outer: Communicator) -> None:
            with comms.connect("nccl", rank=0, size=1, rendezvous=dist.HashStore(), device="cuda:0") as comm:
                assert comm.device == torch.device("cuda", 0)
                with pytest.raises(ValueError, match="cuda:1"):
                    comm.all_reduce(torch.ones(2, device="cuda:1"))
                comm.all_reduce(torch.ones(2, device="cuda:0"))

        cluster.run(body)
