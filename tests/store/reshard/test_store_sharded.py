"""Ranks of one mesh publish their shards; ranks of another mesh, or of none, read them, over real process groups.

Tensors that several parts of a version have are replicas if they are equal; others are refused with their names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.comms.errors import Mismatch, StaleEpoch
from holdfast.ft.processes.zygote_client import zygote
from holdfast.ft.state.boxes import count_of
from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from holdfast.store.data.manifest import LARGE_BYTES
from holdfast.store.interop import import_version
from holdfast.store.publication import Publication
from holdfast.store.reshard import giving
from holdfast.store.reshard.placements import local_of, place
from support.comms.torch_groups import ENVIRON, in_group
from support.programs.forked_programs import run_python
from support.source_tree import ROOT
from support.weights.layouts import as_rank

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


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    zygote().preload("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "holdfast.comms.torchdist")
    with LocalCluster(4, backend="shm", environ=ENVIRON) as found:
        yield found


def values(name: str) -> torch.Tensor:
    count = torch.Size(SHAPES[name]).numel()
    return torch.arange(count, dtype=torch.float32).view(SHAPES[name]) + len(name)


def distributed(kind: str) -> dict[str, Any]:
    sizes, words = MESHES[kind]
    mesh = init_device_mesh("cpu", sizes)
    known = {"s0": Shard(0), "s1": Shard(1), "r": Replicate(), "strided": _StridedShard(0, split_factor=2)}
    found = {}
    for name in SHAPES:
        if "strided" in words and name != "weight":  # torch distributes only what the mesh divides evenly
            continue
        found[name] = distribute_tensor(values(name), mesh, [known[word] for word in words], src_data_rank=None)
    return found


def wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    return [name for name in found if not torch.equal(local(found[name]), local(expected[name]))]


def test_any_mesh_is_published_and_any_mesh_filled(cluster: LocalCluster, tmp_path: Path, url: str) -> None:
    """Every pair of layouts, over four ranks; and plain tensors filled from each, and each from plain ones."""

    def body(rank: int, size: int) -> list[str]:
        problems, given = [], {kind: distributed(kind) for kind in MESHES}
        whole = {name: values(name) for name in SHAPES}
        with WeightStore(url, replicas=1, keep=1) as store:
            for version, source in enumerate([*MESHES, "none"]):
                if source != "none":
                    store.publish(version, given[source])
                elif rank == 0:
                    store.publish(version, whole)
                store.wait(version)
                loaded = store.load(version)
                for target in MESHES:
                    into = {name: torch.zeros_like(each) for name, each in given[target].items() if name in loaded}
                    store.get(version, into, strict=False)
                    problems += [f"{source} to {target}: {name}" for name in wrong(into, given[target])]
                problems += [f"{source} to none: {name}" for name in wrong(loaded, whole)]
                torch.distributed.barrier()
        return problems

    assert in_group(cluster, tmp_path, body) == [[]] * 4


def test_a_mesh_of_readers_is_switched_to_that_of_another_mesh(cluster: LocalCluster, tmp_path: Path, url: str) -> None:
    """Each rank stages and swaps its own shards."""

    def body(rank: int, size: int) -> list[str]:
        with WeightStore(url, replicas=1) as store:
            store.publish(1, distributed("fsdp"))
            store.wait(1)
            into = {"weight": torch.zeros_like(distributed("tensor parallel")["weight"])}
            readers = [f"g{number}" for number in range(size)]
            with store.follow(into, reader=readers[rank], strict=False) as follower:
                torch.distributed.barrier()
                assert rank or store.switch(1, readers).ready == tuple(readers)
                assert follower.catch_up() == 1
                torch.distributed.barrier()
            return wrong(into, distributed("tensor parallel"))

    assert in_group(cluster, tmp_path, body) == [[]] * 4


def test_shards_that_ranks_saved_with_dcp_are_joined(cluster: LocalCluster, store: WeightStore, tmp_path: Path) -> None:
    whole = torch.arange(35.0).view(7, 5)

    def body(rank: int, size: int) -> None:
        from torch.distributed import checkpoint

        mesh = init_device_mesh("cpu", (size,))
        state = {name: distribute_tensor(whole, mesh, [Shard(dim)]) for dim, name in enumerate(("rows", "columns"))}
        checkpoint.save(state, checkpoint_id=tmp_path / "theirs")

    in_group(cluster, tmp_path, body, "gloo")
    assert import_version(store, tmp_path / "theirs", 1) == 1
    found = store.load(1)
    assert torch.equal(found["rows"], whole) and torch.equal(found["columns"], whole)


@pytest.mark.thorough
def test_the_example_loses_a_trainer_and_serves_its_version() -> None:
    gone, served = run_python(ROOT / "examples" / "fsdp_to_tensor_parallel.py").strip().splitlines()
    assert "rank 1 died" in gone
    (version, loss), (other, same) = ast.literal_eval(served.partition(": ")[2])
    assert version == other == 3 and loss == same < 0.05


def fully_sharded_over_tensor_parallel() -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 5))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return state


def test_the_state_of_fsdp_over_tensor_parallel_comes_and_goes(cluster: LocalCluster, tmp_path: Path, url: str) -> None:
    """Each rank's blocks are its local tensors, each element is given once, and all make up the whole."""

    def body(rank: int, size: int) -> tuple[list[str], dict[str, int]]:
        state = fully_sharded_over_tensor_parallel()
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
        into = {name: torch.zeros_like(each) for name, each in state.items()}
        gives = giving.given({name: place(name, each) for name, each in state.items()})
        given = {name: sum(count_of(box) for box, _ in gives.blocks.get(name, ())) for name in state}
        with WeightStore(url, replicas=1) as store:
            store.publish(1, state)
            store.get(store.wait(1), into)
            found = wrong(into, state) + wrong(store.load(1), whole)
            torch.distributed.barrier()
        return found, {name: given[name] - (whole[name].numel() if rank == 0 else 0) for name in state}

    found = in_group(cluster, tmp_path, body)
    assert [problems for problems, _ in found] == [[]] * 4
    assert {sum(given[name] for _, given in found) for name in found[0][1]} == {0}, "each element once"


def test_a_collective_that_is_under_way_is_waited_for(cluster: LocalCluster, tmp_path: Path) -> None:
    """All that look at a local tensor wait for it while its gather is under way."""
    whole = torch.arange(4.0 * 1000).view(4, 1000)

    def body(rank: int, size: int) -> list[str]:
        mesh, found = init_device_mesh("cpu", (4,)), []
        for look in (local_of, lambda tensor: place("weight", tensor).local):
            split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            gathered = split.redistribute(placements=[Replicate()], async_op=True)
            found.append(type(gathered._local_tensor).__name__)
            local = look(gathered)
            assert type(local) is torch.Tensor and torch.equal(local, whole)
        return found

    assert in_group(cluster, tmp_path, body) == [["AsyncCollectiveTensor"] * 2] * 4


SMALL, LARGE = 3, LARGE_BYTES // 4 + 7
DISAGREE = r"'shared' has other bytes in part 1 than in part 0; publish equal bytes, or each tensor in one part"


def stage(number: int, shared: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of one stage of a pipeline: a layer of its own, and a tensor that all stages have."""
    return {f"layer{number}": torch.full((4,), float(number)), "shared": shared}


@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_stages_that_publish_equal_bytes_of_a_tensor_share_it(store: WeightStore, size: int) -> None:
    for number in range(3):
        store.publish(1, stage(number, torch.arange(float(size))), part=number, parts=3)
    into = {f"layer{number}": torch.zeros(4) for number in range(3)} | {"shared": torch.zeros(size)}
    assert store.get(1, into) == 1
    assert into["shared"].tolist() == list(map(float, range(size)))
    assert [into[f"layer{number}"].unique().item() for number in range(3)] == [0.0, 1.0, 2.0]
    assert store.load(1)["shared"].equal(into["shared"])
    assert store.load(1, ["shared"], map=True)["shared"].equal(into["shared"])


def test_other_forms_are_refused_and_parts_of_an_epoch_that_is_over_not_compared(store: WeightStore) -> None:
    store.publish(1, stage(0, torch.zeros(4)), part=0, parts=2)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(Mismatch, match=r"a part of the version has shared .*, another shared float32\[4\]"):
            store.publish(1, stage(1, other), part=1, parts=2)
    store.publish(1, stage(0, torch.zeros(SMALL)), part=0, parts=2, fence=1)
    for number in (1, 0):
        store.publish(1, stage(number, torch.ones(SMALL)), part=number, parts=2, fence=2)
    with pytest.raises(StaleEpoch, match="epoch 1"):
        store.publish(2, stage(0, torch.zeros(SMALL)), fence=1)
    assert store.load(1)["shared"].tolist() == [1.0] * SMALL


def test_of_publishers_that_begin_together_one_is_refused(store: WeightStore) -> None:
    """The catalogue orders them: the later one finds the earlier one listed."""
    together = Barrier(2)

    def publish(number: int) -> None:
        together.wait(20.0)
        store.publish(1, stage(number, torch.full((LARGE,), float(number))), part=number, parts=2)

    with ThreadPoolExecutor(2) as pool:
        (error,) = filter(None, [each.exception() for each in [pool.submit(publish, number) for number in range(2)]])
    assert isinstance(error, Mismatch) and "'shared' has other bytes in part" in str(error)
    assert store.versions() == []


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_reader_refuses_parts_that_disagree(store: WeightStore, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publication, "_to_compare", lambda *_: [])
    for number in range(2):
        store.publish(1, stage(number, torch.full((size,), float(number))), part=number, parts=2)
    into = {"shared": torch.full((size,), 7.0)}
    for _ in range(2):
        with pytest.raises(Mismatch, match=DISAGREE):
            store.get(1, into, strict=False)
    assert into["shared"].unique().tolist() == [7.0]
    with pytest.raises(Mismatch, match=DISAGREE):
        store.load(1, ["layer0"])


def test_replicas_of_a_tensor_parallel_model_publish_the_same_boxes_and_buffers(store: WeightStore) -> None:
    """DDP over a mesh, with DTensors on the tensor-parallel dimension only: both replicas give all they have."""
    weight, buffer = torch.arange(12.0).view(4, 3), torch.arange(5.0)

    def publish(version: int, rank: int, added: float = 0.0) -> None:
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "tp"))
            local = distribute_tensor(weight + added, mesh["tp"], [Shard(0)], src_data_rank=None)
            store.publish(version, {"weight": local, "buffer": buffer})

    for rank in range(4):
        publish(1, rank)
    found = store.load(1)
    assert found["weight"].equal(weight) and found["buffer"].equal(buffer)
    for rank in range(2):
        publish(2, rank)
    with pytest.raises(Mismatch, match="'weight' has other bytes in part 2 than in part 0"):
        publish(2, 2, added=1.0)


@given(st.lists(st.sampled_from([0, 1, 60, 61, LARGE_BYTES // 4, LARGE]), min_size=1, max_size=6), st.data())
def test_only_tensors_with_other_bytes_are_named(sizes: list[int], data: st.DataObject) -> None:
    """Small tensors share a piece with neighbours that differ; those are not named for it."""
    state = {f"t{number}": torch.arange(float(size)) for number, size in enumerate(sizes)}
    full = [name for name, tensor in state.items() if len(tensor)]
    changed = data.draw(st.sets(st.sampled_from(full))) if full else set()
    other = {name: tensor + (name in changed) for name, tensor in state.items()}
    with WeightStore("memory://shared") as store:
        store.publish(1, state | {"own": torch.zeros(3)}, part=0, parts=2)
        if changed:
            with pytest.raises(Mismatch) as refused:
                store.publish(1, other, part=1, parts=2)
            assert {name for name in state if f"'{name}' has other" in str(refused.value)} == changed
            assert store.versions() == []
        store.publish(1, state, part=1, parts=2)
        assert store.versions() == [1]
