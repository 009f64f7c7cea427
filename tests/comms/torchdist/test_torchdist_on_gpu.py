"""`torch.distributed` over holdfast's `nccl`, with CUDA tensors: the losses of torch's own NCCL group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast.comms import Communicator
from holdfast.comms.torchdist import Options
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, train_ddp, train_fsdp2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize("train", [train_ddp, train_fsdp2])
def test_gpu_losses_equal_those_of_torchs_own_nccl(
    train: Callable[[int, int, str], list[float]], tmp_path: Path
) -> None:
    def body(comm: Communicator) -> dict[str, list[float]]:
        import holdfast.comms.torchdist  # noqa: F401  # registers the name

        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
        found = {}
        for name, options in (("nccl", None), ("holdfast", Options("nccl", device="cuda:0"))):
            dist.init_process_group(
                name,
                init_method=f"file://{tmp_path}/{name}",
                rank=comm.rank,
                world_size=comm.size,
                timeout=timedelta(seconds=60),
                pg_options=options,
            )
            try:
                found[name] = train(comm.rank, comm.size, "cuda:0")
            finally:
                dist.destroy_process_group()
        return found

    with LocalCluster(2, "gloo", timeout=120.0, environ=ENVIRON) as cluster:
        results = cluster.run(body)
    assert [each["holdfast"] for each in results] == [each["nccl"] for each in results]
    assert results[0]["nccl"] != results[1]["nccl"]
