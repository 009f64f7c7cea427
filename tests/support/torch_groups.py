"""torch in tests: process groups over the ranks of a cluster, and a small sharded model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from holdfast.comms import Communicator
from holdfast.harness import LocalCluster

T = TypeVar("T")


ENVIRON = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def in_group(cluster: LocalCluster, path: Path, body: Callable[[int, int], T], backend: str = "holdfast") -> list[T]:
    """Call `body(rank, size)` on every rank, inside a default process group."""

    def run(comm: Communicator) -> T:
        import holdfast.comms.torchdist  # noqa: F401  # registers the name

        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            init_method=f"file://{path}/{backend}",
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=60),
        )
        try:
            return body(comm.rank, comm.size)
        finally:
            dist.destroy_process_group()

    return cluster.run(run)


def sharded_model(mesh: Any) -> dict[str, Any]:
    """A small model that `mesh` does not divide evenly, sharded with `fully_shard`, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
