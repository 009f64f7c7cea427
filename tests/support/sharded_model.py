"""A model that is small enough to train while ranks die, and does not divide evenly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def build(mesh: Any) -> dict[str, Any]:
    """Sharded with `fully_shard` over any mesh that it takes."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
