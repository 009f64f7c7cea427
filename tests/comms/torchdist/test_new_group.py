"""`new_group` called differently by ranks, and `torch.compile` of DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.comms import Mismatch
from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, in_group


def test_groups_with_equal_numbers_and_different_members_are_a_mismatch(tmp_path: Path) -> None:
    """Ranks 1 and 2 make a group without rank 0; rank 0's next group then takes the same number."""

    def body(rank: int, size: int) -> None:
        if rank:
            dist.new_group([1, 2])
        dist.barrier()
        if rank == 0:
            with pytest.raises(
                Mismatch, match=r"of ranks \[0, 2\] on rank 0, and of ranks \[1, 2\] on rank 1: every rank"
            ):
                dist.new_group([0, 2])
        dist.barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor == 3

    with LocalCluster(3, "shm", timeout=60.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        in_group(cluster, tmp_path, body)


@pytest.mark.thorough
def test_a_compiled_ddp_model_has_the_gradients_of_ddp(tmp_path: Path) -> None:
    """Uses dynamo's DDP optimizer, which splits the graph at the two buckets."""

    def body(rank: int, size: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
        compiled = torch.compile(model, backend="aot_eager")
        data = torch.full((4, 8), rank + 1.0)

        def gradients(forward: object) -> list[torch.Tensor]:
            model.zero_grad()
            assert callable(forward)
            forward(data).sum().backward()
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

        plain, fast = gradients(model), gradients(compiled)
        assert len(plain) == len(fast) == 6
        for one, other in zip(plain, fast, strict=True):
            torch.testing.assert_close(one, other)

    with LocalCluster(2, "shm", timeout=100.0, environ={**ENVIRON, "HOLDFAST_BACKEND": "shm"}) as cluster:
        in_group(cluster, tmp_path, body)
