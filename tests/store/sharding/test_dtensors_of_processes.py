"""The blocks of real DTensors, on four processes: what `to_local` has, and together the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.harness import LocalCluster
from holdfast.store.sharding.giving import given
from holdfast.store.sharding.placed_tensor import local_of, place
from support.torch_groups import in_group

State = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and what they are as a whole."""


def fully_sharded_over_tensor_parallel() -> State:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return with_wholes(state)


def hybrid_sharded() -> State:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return with_wholes(model.state_dict())


def with_wholes(state: dict[str, Any]) -> State:
    from torch.distributed.tensor import DTensor

    return {
        name: (each, each.full_tensor().detach() if isinstance(each, DTensor) else each) for name, each in state.items()
    }


def differences(make: Callable[[], State]) -> list[str]:
    """The names of tensors with blocks that differ from `to_local`, or do not make up the whole."""
    from torch.distributed.tensor import DTensor

    state = make()
    placed = {name: place(name, tensor) for name, (tensor, _) in state.items()}
    wrong, gives = [], given(placed)
    assert (gives.part, gives.parts) == (dist.get_rank(), 4)
    for name, (tensor, whole) in state.items():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for box, there in placed[name].blocks:
            wrong += [name] * (not torch.equal(local[at(there)], whole[at(box)]))
        mine = [(box, local[at(there)].tolist()) for box, there in gives.blocks.get(name, ())]
        everything: list[Any] = [None] * 4
        dist.all_gather_object(everything, mine)
        count, together = torch.zeros(whole.shape), torch.full_like(whole, -1)
        for box, values in (each for of_rank in everything for each in of_rank):
            count[at(box)] += 1
            together[at(box)] = torch.tensor(values, dtype=whole.dtype).view(together[at(box)].shape)
        wrong += [name] * (not torch.equal(together, whole) or not bool((count == 1).all()))
    return wrong


def at(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


@pytest.mark.parametrize("make", [fully_sharded_over_tensor_parallel, hybrid_sharded])
def test_the_blocks_of_four_processes_are_their_local_tensors_and_make_up_the_whole(
    cluster: LocalCluster, tmp_path: Path, make: Callable[[], State]
) -> None:
    assert in_group(cluster, tmp_path, lambda rank, size: differences(make)) == [[]] * 4


def gathered_without_waiting() -> list[str]:
    """All that look at a local tensor wait for it while its gather is under way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(4.0 * 1000).view(4, 1000)
    mesh = init_device_mesh("cpu", (4,))
    found = []
    for look in (local_of, lambda tensor: place("weight", tensor).local):
        split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        gathered = split.redistribute(placements=[Replicate()], async_op=True)
        found.append(type(gathered._local_tensor).__name__)
        local = look(gathered)
        assert type(local) is torch.Tensor and torch.equal(local, whole)
    return found


def test_a_collective_that_is_under_way_is_waited_for(cluster: LocalCluster, tmp_path: Path) -> None:
    found = in_group(cluster, tmp_path, lambda rank, size: gathered_without_waiting())
    assert found == [["AsyncCollectiveTensor"] * 2] * 4
