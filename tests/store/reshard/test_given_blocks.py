"""Which rank of a mesh publishes which blocks: every element once, the bytes spread over ranks that hold the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import count_of, whole
from holdfast.store.reshard.giving import Given, given
from holdfast.store.reshard.placements import LocalBlock, PlacedTensor, place
from support.weights.layouts import Shape, Sizes, as_rank, meshes, part, placements, shapes

State = dict[str, torch.Tensor]


def split(tensor: torch.Tensor, mesh: DeviceMesh, *how: Any) -> DTensor:
    return distribute_tensor(tensor, mesh, how, src_data_rank=None)


def placed_on_each_rank(size: int, state: Callable[[], State]) -> list[dict[str, PlacedTensor]]:
    found = []
    for rank in range(size):
        with as_rank(rank, size):
            found.append({name: place(name, tensor) for name, tensor in state().items()})
    return found


def gather(ranks: list[dict[str, PlacedTensor]], name: str) -> torch.Tensor:
    """Put a tensor together from what the ranks give.

    An element that is never given is -1; one that is given twice is -2.
    """
    whole_tensor = torch.full(ranks[0][name].shape, -1)
    for placed in ranks:
        for box, local in given(placed).blocks.get(name, ()):
            there = part(whole_tensor, box)
            there.copy_(torch.where(there == -1, part(placed[name].local, local), -2))
    return whole_tensor


@given_examples(meshes, st.lists(shapes, min_size=1, max_size=4), st.data())
def test_the_ranks_of_any_mesh_give_each_element_once(sizes: Sizes, some: list[Shape], data: st.DataObject) -> None:
    chosen = [data.draw(placements(sizes, len(shape))) for shape in some]
    tensors = [torch.arange(math.prod(shape)).view(shape) for shape in some]

    def state() -> State:
        mesh = DeviceMesh("cpu", torch.arange(math.prod(sizes)).view(sizes))
        found: State = {
            str(at): split(each, mesh, *how) for at, (each, how) in enumerate(zip(tensors, chosen, strict=True))
        }
        return found | {"plain": torch.arange(3)}

    ranks = placed_on_each_rank(math.prod(sizes), state)
    for rank, placed in enumerate(ranks):
        assert given(placed)[:2] == (rank, len(ranks))
        for name, each in placed.items():
            full = tensors[int(name)] if name != "plain" else torch.arange(3)
            assert all(
                torch.equal(part(each.local, local), part(full, box)) for box, local in each.blocks if full.numel()
            )
    for number, tensor in enumerate(tensors):
        assert torch.equal(gather(ranks, str(number)), tensor)
        if not tensor.numel():
            assert sum(str(number) in given(placed).blocks for placed in ranks) == 1
    assert torch.equal(gather(ranks, "plain"), torch.arange(3))


def test_replicas_share_the_bytes_evenly() -> None:
    def state() -> State:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
        weights = [torch.zeros(64 + 8 * (number % 5), 16) for number in range(40)]
        return {str(at): split(w, mesh, Replicate(), Shard(0)) for at, w in enumerate(weights)}

    loads = [bytes_of(given(placed), placed) for placed in placed_on_each_rank(8, state)]
    assert sum(loads) == sum(4 * 16 * (64 + 8 * (number % 5)) for number in range(40))
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


def bytes_of(gives: Given, placed: Mapping[str, PlacedTensor]) -> int:
    return sum(placed[n].dtype.itemsize * count_of(b.box) for n, blocks in gives.blocks.items() for b in blocks)


def test_tensors_on_submeshes_of_one_root_are_given_once() -> None:
    """Norms that are sharded over one dimension only are replicated along the other."""
    full = torch.arange(48).view(8, 6)

    def state() -> State:
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        flat, apart = root["replicate", "shard"]._flatten("data"), root["replicate", "tp"]._flatten("apart")
        return {
            "both": split(full, root["shard", "tp"], _StridedShard(0, split_factor=2), Shard(0)),
            "norm": split(full, root["shard"], Shard(0)),
            "tp": split(full, root["tp"], Shard(1)),
            "all": split(full, root, Replicate(), Shard(1), Shard(0)),
            "flat": split(full, flat, Shard(0)),
            "apart": split(full, apart, Shard(0)),
        }

    ranks = placed_on_each_rank(8, state)
    for name in ranks[0]:
        assert torch.equal(gather(ranks, name), full), name


def test_shards_that_were_cut_in_another_order_than_the_meshs_are_placed_as_they_were_cut() -> None:
    """A spec may say that its last mesh dimension was cut first, in place of a strided placement."""
    entry = pytest.importorskip("torch.distributed.tensor._dtensor_spec").ShardOrderEntry
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    full = torch.arange(8)
    meta = TensorMeta(full.shape, (1,), full.dtype)
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(entry(0, (1, 0)),))
            local = full.chunk(2)[rank % 2].chunk(2)[rank // 2]
            found = place("w", DTensor(local, spec, requires_grad=False))  # type: ignore[call-arg]
        ((box, _),) = found.blocks
        assert torch.equal(part(full, box), local)


def test_stages_of_a_pipeline_give_all_that_they_have() -> None:
    """No tensor's mesh has the dimension of the stages: their state dicts differ."""
    full = torch.arange(12)
    ranks = []
    for rank in range(4):
        with as_rank(rank, 4):
            root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
            mine = split(full, root["shard"], Replicate())
            ranks.append({f"layer{rank // 2}": place("layer", mine), f"buffer{rank // 2}": place("buffer", full)})
    assert [given(placed)[:2] for placed in ranks] == [(rank, 4) for rank in range(4)]
    for stage in range(2):
        stages = ranks[2 * stage : 2 * stage + 2]
        assert torch.equal(gather(stages, f"layer{stage}"), full)
        assert torch.equal(gather(stages, f"buffer{stage}"), full)


def test_without_dtensors_the_only_part_has_everything() -> None:
    placed = {"a": place("a", torch.ones(2, 3)), "b": place("b", torch.ones(()))}
    box = whole((2, 3))
    assert given(placed) == Given(0, 1, {"a": (LocalBlock(box, box),), "b": (LocalBlock((), ()),)})


def test_meshes_without_a_common_root_are_refused_with_both_names() -> None:
    with as_rank(1, 4):
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        other = DeviceMesh("cpu", [0, 1])
        crossed = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        state = {"x": on(root, 2), "y": on(root["a"], 1), "z": on(other, 1), "c": on(crossed, 2)}
        placed = {name: place(name, tensor) for name, tensor in state.items()}
    assert given({name: placed[name] for name in "xy"}).parts == 4
    with pytest.raises(Mismatch, match=r"'x' lies on a mesh of 2x2 ranks out of 4, 'z' on a mesh of 2 ranks out of 2"):
        given({name: placed[name] for name in "xyz"})
    with pytest.raises(Mismatch, match=r"'c' lies on .* 'x' on"):
        given({name: placed[name] for name in "cx"})


def on(mesh: DeviceMesh, dims: int) -> DTensor:
    return split(torch.arange(8), mesh, *[Replicate()] * dims)


def test_a_rank_outside_of_the_mesh_holds_nothing_and_cannot_publish() -> None:
    with as_rank(3, 4):
        placed = {"w": place("w", on(DeviceMesh("cpu", [0, 1]), 1))}
    assert placed["w"].blocks == ()
    with pytest.raises(Mismatch, match="'w' lies on a mesh of 2 ranks out of 2 without this rank"):
        given(placed)


def test_a_local_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        wrong = DTensor.from_local(torch.ones(5), mesh, (Shard(0),), shape=torch.Size([6]), stride=(1,))
        with pytest.raises(Mismatch, match=r"'w': its placements .* give this rank \(3,\) of \(6,\), .* has \(5,\)"):
            place("w", wrong)


def fully_sharded(local: torch.Tensor, mesh: DeviceMesh, length: int) -> DTensor:
    how: tuple[Any, ...] = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    return DTensor.from_local(local, mesh, how, run_check=False, shape=torch.Size([length]), stride=(1,))


def test_an_uneven_tensor_of_fully_shard_over_tensor_parallel_is_placed_as_it_was_cut() -> None:
    """Rank (3, 1) of a 4x2 mesh has the last of 9 elements.

    Torch's placements say that rank (3, 0) has it.
    """
    full, seen = torch.arange(9), []
    for rank in range(8):
        with as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2))
            columns = full.chunk(2)[rank % 2].chunk(4)
            local = columns[rank // 2] if rank // 2 < len(columns) else full[:0]
            placed = place("w", fully_sharded(local, mesh, 9))
        for box, there in placed.blocks:
            assert torch.equal(part(full, box), part(placed.local, there))
            seen += part(full, box).tolist()
    assert sorted(seen) == full.tolist()


def test_an_uneven_tensor_that_could_have_been_cut_in_two_ways_is_refused() -> None:
    with as_rank(14, 16):
        mesh = init_device_mesh("cpu", (4, 4))
        with pytest.raises(Unsupported, match=r"'w', of shape \(38,\), which mesh of 4x4 ranks out of 16 does not"):
            place("w", fully_sharded(torch.tensor([29]), mesh, 38))
