"""`new_group` called differently by ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
