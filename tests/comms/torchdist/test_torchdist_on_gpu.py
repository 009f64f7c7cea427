"""`torch.distributed` over holdfast's `nccl`, with CUDA tensors: the losses of torch's own NCCL group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.comms import Communicator
from holdfast.comms.torchdist import Options
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(240),
]


def losses_of(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(16, 8, device="cuda:0")).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).to("cuda:0")


def train_ddp(rank: int, size: int) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    return losses_of(DistributedDataParallel(small_model(), device_ids=[0], bucket_cap_mb=0.001), rank)


def train_fsdp2(rank: int, size: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    model = small_model()
    mesh = init_device_mesh("cuda", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses_of(model, rank)


@pytest.mark.parametrize("train", [train_ddp, train_fsdp2])
def test_gpu_losses_equal_those_of_torchs_own_nccl(train: Callable[[int, int], list[float]], tmp_path: Path) -> None:
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
                found[name] = train(comm.rank, comm.size)
            finally:
                dist.destroy_process_group()
        return found

    with LocalCluster(2, "gloo", timeout=120.0, environ=ENVIRON) as cluster:
        results = cluster.run(body)
    assert [each["holdfast"] for each in results] == [each["nccl"] for each in results]
    assert results[0]["nccl"] != results[1]["nccl"]
