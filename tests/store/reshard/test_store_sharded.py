"""Ranks of one mesh publish their shards; ranks of another mesh, or of none, read them, over real process groups."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from holdfast.store.interop.dcp import import_version
from holdfast.store.reshard.giving import given
from holdfast.store.reshard.placements import local_of, place
from support.source_tree import ROOT
from support.torch_groups import in_group

SHAPES = {"weight": (12, 10), "odd": (7, 5), "small": (3, 2), "empty": (0, 4), "large": (513, 260)}
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fsdp": ((4,), ("s0",)),
    "tensor parallel": ((4,), ("s1",)),
    "replicated": ((4,), ("r",)),
    "hsdp": ((2, 2), ("r", "s0")),
    "fsdp and tensor parallel": ((2, 2), ("s0", "s1")),
    "fsdp within tensor parallel": ((2, 2), ("strided", "s0")),
    "three dimensions": ((2, 1, 2), ("s1", "r", "s0")),
}


def values(name: str) -> torch.Tensor:
    count = torch.Size(SHAPES[name]).numel()
    return torch.arange(count, dtype=torch.float32).view(SHAPES[name]) + len(name)


def distributed(kind: str, blank: bool = False) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes, words = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    known = {"s0": Shard(0), "s1": Shard(1), "r": Replicate(), "strided": _StridedShard(0, split_factor=2)}
    found = {}
    for name in SHAPES:
        if "strided" in words and name != "weight":  # torch distributes only what the mesh divides evenly
            continue
        tensor = distribute_tensor(values(name), mesh, [known[word] for word in words], src_data_rank=None)
        found[name] = torch.zeros_like(tensor) if blank else tensor
    return found


def wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    return [name for name in found if not torch.equal(local(found[name]), local(expected[name]))]


def test_any_mesh_is_published_and_any_mesh_filled(cluster: LocalCluster, tmp_path: Path) -> None:
    """Every pair of layouts, over four ranks; and plain tensors filled from each."""
    url = f"sqlite:///{tmp_path}/job.sqlite"

    def body(rank: int, size: int) -> list[str]:
        problems, given = [], {kind: distributed(kind) for kind in MESHES}
        with WeightStore(url, replicas=1, keep=1) as store:
            for version, source in enumerate(MESHES):
                store.publish(version, given[source])
                store.wait(version)
                loaded = store.load(version)
                for target in MESHES:
                    into = {name: torch.zeros_like(each) for name, each in given[target].items() if name in loaded}
                    store.get(version, into, strict=False)
                    problems += [f"{source} to {target}: {name}" for name in wrong(into, given[target])]
                whole = {name: values(name) for name in loaded}
                problems += [f"{source} to none: {name}" for name in wrong(loaded, whole)]
                torch.distributed.barrier()
        return problems

    assert in_group(cluster, tmp_path, body) == [[]] * 4


def test_plain_tensors_fill_a_mesh_and_replicas_are_given_once(cluster: LocalCluster, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/job.sqlite"

    def body(rank: int, size: int) -> tuple[list[str], int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        with WeightStore(url, replicas=1) as store:
            if rank == 0:
                store.publish(1, {name: values(name) for name in SHAPES})
            store.wait(1)
            into = distributed("fsdp", blank=True)
            store.get(1, into)
            problems = wrong(into, distributed("fsdp"))
            mesh = init_device_mesh("cpu", (size,))
            store.publish(
                2, {"replicated": distribute_tensor(torch.ones(64, 1024), mesh, [Replicate()]), "plain": values("odd")}
            )
            store.wait(2)
            version = store._read().need(2)
            torch.distributed.barrier()
            return problems, sum(shard.replicas[0].handle.nbytes for shard in version.shards)

    for problems, nbytes in in_group(cluster, tmp_path, body):
        assert problems == []
        assert 64 * 1024 * 4 < nbytes < 1.1 * 64 * 1024 * 4, "one rank gives each replica"


def test_a_mesh_of_readers_is_switched_to_the_version_of_another_mesh(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each rank stages and swaps its own shards."""
    url = f"sqlite:///{tmp_path}/job.sqlite"

    def body(rank: int, size: int) -> list[str]:
        with WeightStore(url, replicas=1) as store:
            store.publish(1, distributed("fsdp"))
            store.wait(1)
            into = {"weight": distributed("tensor parallel", blank=True)["weight"]}
            readers = [f"g{number}" for number in range(size)]
            with store.follow(into, reader=readers[rank], strict=False) as follower:
                torch.distributed.barrier()
                assert rank or store.switch(1, readers).ready == tuple(readers)
                assert follower.catch_up() == 1
                torch.distributed.barrier()
            return wrong(into, distributed("tensor parallel"))

    assert in_group(cluster, tmp_path, body) == [[]] * 4


def test_what_ranks_saved_with_dcp_as_shards_is_put_together(
    cluster: LocalCluster, store: WeightStore, tmp_path: Path
) -> None:
    whole = torch.arange(35.0).view(7, 5)

    def body(rank: int, size: int) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        state = {name: distribute_tensor(whole, mesh, [Shard(dim)]) for dim, name in enumerate(("rows", "columns"))}
        checkpoint.save(state, checkpoint_id=tmp_path / "theirs")

    in_group(cluster, tmp_path, body, "gloo")
    assert import_version(store, tmp_path / "theirs", 1) == 1
    found = store.load(1)
    assert torch.equal(found["rows"], whole) and torch.equal(found["columns"], whole)


@pytest.mark.thorough
def test_the_example_loses_a_trainer_and_serves_its_version() -> None:
    example = ROOT / "examples" / "fsdp_to_tensor_parallel.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    gone, served = done.stdout.strip().splitlines()
    assert "rank 1 died" in gone
    (version, loss), (other, same) = ast.literal_eval(served.partition(": ")[2])
    assert version == other == 3 and loss == same < 0.05


# -- the blocks of real DTensors, on four processes: what `to_local` has, and together the whole tensor


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
