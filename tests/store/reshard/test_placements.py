"""A rank has the blocks that torch gives it; a plan copies each element once; ranks publish each element once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as given_examples
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import count_of, shape_of, whole
from holdfast.store.reshard.giving import given
from holdfast.store.reshard.placements import (
    Blocks,
    LocalBlock,
    PlacedTensor,
    blocks_of,
    cuts_of,
    in_cutting_order,
    local_shape,
    place,
)
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, PartBox, plan
from support.weights.layouts import (
    Shape,
    Sizes,
    as_rank,
    at,
    coordinates,
    meshes,
    part,
    placements,
    shapes,
    torchs_local,
)


@given_examples(meshes, shapes, st.data())
def test_the_blocks_of_every_rank_are_what_torch_gives_it(sizes: Sizes, shape: Shape, data: st.DataObject) -> None:
    placed = data.draw(placements(sizes, len(shape)))
    cuts = cuts_of("w", placed, len(shape))
    tensor = torch.arange(math.prod(shape)).view(shape)
    for coords in coordinates(sizes):
        local = torchs_local(tensor, placed, sizes, coords)
        assert local_shape(shape, cuts, sizes, coords) == tuple(local.shape)
        seen = torch.zeros_like(local)
        for box, there in blocks_of(shape, cuts, sizes, coords):
            assert torch.equal(part(local, there), part(tensor, box))
            part(seen, there).add_(1)
        assert (seen == 1).all()


def test_fsdp_over_tensor_parallel_is_one_box_free_chunks_are_several_and_an_empty_tensor_has_an_empty_one() -> None:
    both = cuts_of("w", (_StridedShard(0, split_factor=2), Shard(0)), 1)
    assert blocks_of((8,), both, (2, 2), (1, 0)) == (LocalBlock(((2, 4),), ((0, 2),)),)
    free = cuts_of("w", (_StridedShard(0, split_factor=2),), 1)
    assert blocks_of((8,), free, (2,), (1,)) == (LocalBlock(((2, 4),), ((0, 2),)), LocalBlock(((6, 8),), ((2, 4),)))
    cuts = cuts_of("w", (Shard(0),), 2)
    assert blocks_of((0, 3), cuts, (2,), (1,)) == (LocalBlock(((0, 0), (0, 3)), ((0, 0), (0, 3))),)
    assert blocks_of((1, 0), cuts, (2,), (1,)) == (LocalBlock(((0, 0), (0, 0)), ((0, 0), (0, 0))),)
    assert blocks_of((1, 3), cuts, (2,), (1,)) == ()
    from_the_end = (_StridedShard(-2, split_factor=2), Replicate(), Shard(-1))
    assert cuts_of("w", from_the_end, 3) == cuts_of("w", (_StridedShard(1, split_factor=2), Replicate(), Shard(2)), 3)
    stands_for_no_cut = cuts_of("w", (_StridedShard(0, split_factor=3), Shard(0)), 1)
    assert in_cutting_order(stands_for_no_cut, (2, 2)) is None


class Interleaved(Shard):
    """A placement of another library."""


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ((Partial(),), r"'w' is placed as .*: ranks hold summands of it, no elements; all-reduce it first"),
        ((Shard(0), Partial("max")), r"summands"),
        ((_MaskPartial("sum"),), r"summands"),
        ((Shard(2),), r"it has 2 dimensions"),
        ((Shard(-3),), r"it has 2 dimensions"),
        ((Interleaved(0),), r"'w' is placed as .*: Interleaved is not known here"),
    ],
)
def test_placements_without_elements_or_of_another_library_are_refused_by_name(placed: Any, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        cuts_of("w", placed, 2)


@given_examples(meshes, st.integers(0, 40), st.data())
def test_the_order_of_fully_shard_differs_if_uneven_only(sizes: Sizes, length: int, data: st.DataObject) -> None:
    """`fully_shard` cuts what tensor parallelism has cut; its placement says chunks that stand for that cut."""
    sizes = (*sizes[:1], data.draw(st.integers(1, 8 // sizes[0])))
    cuts = cuts_of("w", (_StridedShard(0, split_factor=sizes[1]), Shard(0)), 1)
    order = in_cutting_order(cuts, sizes)
    tensor = torch.arange(length)
    for coords in coordinates(sizes):
        tensor_parallel = torchs_local(tensor, (Shard(0),), sizes[1:], coords[1:])
        local = torchs_local(tensor_parallel, (Shard(0),), sizes[:1], coords[:1])
        assert [i for box, _ in blocks_of((length,), order, sizes, coords) for i in range(*box[0])] == local.tolist()
        if length % math.prod(sizes) == 0 and length:
            assert blocks_of((length,), order, sizes, coords) == blocks_of((length,), cuts, sizes, coords)


def targets(blocks: Mapping[str, Blocks]) -> list[BoxTarget]:
    return [BoxTarget(name, name, *block) for name, each in blocks.items() for block in each]


@given_examples(st.integers(1, 3), st.data())
def test_arbitrary_boxes_that_overlap_are_used_once_or_what_is_missing_is_named(dims: int, data: st.DataObject) -> None:
    pair = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda two: (min(two), max(two)))
    some = st.lists(st.tuples(*[pair] * dims), min_size=1, max_size=12)
    there, wanted = data.draw(some), data.draw(some)
    sources = {"w": [PartBox(number, box) for number, box in enumerate(there)]}
    owned = np.zeros((5,) * dims, bool)
    for box in there:
        owned[at(box)] = True
    missing = [box for box in wanted if not owned[at(box)].all()]
    asked = [BoxTarget("into", "w", box, whole(shape_of(box))) for box in wanted if box not in missing]
    for target in asked:
        seen = np.zeros(shape_of(target.box), int)
        for copy in plan([target], sources):
            seen[at(copy.put)] += 1
            assert shape_of(copy.take) == shape_of(copy.put)
            assert all(low <= high <= most for (low, high), most in zip(copy.take, shape_of(copy.source), strict=True))
        assert (seen == 1).all()
    if missing:
        with pytest.raises(Mismatch, match="no part has"):
            plan([BoxTarget("into", "w", box, whole(shape_of(box))) for box in wanted], sources)


def test_one_error_lists_all_that_is_missing_and_cuts_a_long_list() -> None:
    sources = {"a": [PartBox(0, ((0, 2), (0, 3)))], "b": [PartBox(0, ((0, 2),))], "empty": list[PartBox]()}
    blocks: dict[str, Blocks] = {
        "a": (LocalBlock(((0, 4), (1, 3)), ((0, 4), (0, 2))),),
        "b": (LocalBlock(((0, 2), (0, 2)), ((0, 2), (0, 2))),),
        "c": (LocalBlock((), ()),),
        "empty": (LocalBlock(((0, 0),), ((0, 0),)),),
    }
    with pytest.raises(Mismatch) as caught:
        plan(targets(blocks), sources)
    assert str(caught.value) == (
        "the sources do not have all that is wanted: no part has [2:4, 1:3] of 'a'; 'b' has 1 dimensions, not 2; "
        "there is no 'c'; there is no 'empty'"
    )
    with pytest.raises(Mismatch, match=r"'19'; and 980 more$"):
        plan([BoxTarget(str(number), str(number), (), ()) for number in range(1000)], {})


def test_parts_with_a_replica_share_the_load_a_box_that_has_all_is_preferred_and_many_sources_are_found() -> None:
    box = whole((10, 10))
    sources = {str(number): [PartBox(part, box) for part in range(4)] for number in range(40)}
    wanted = targets({name: (LocalBlock(box, box),) for name in sources})
    assert Counter(copy.part for copy in plan(wanted, sources)) == dict.fromkeys(range(4), 10)
    assert [plan(wanted[:1], sources, reader)[0].part for reader in range(4)] == [0, 1, 2, 3]
    halves = [PartBox(0, ((0, 4),)), PartBox(1, ((4, 8),)), PartBox(2, ((0, 8),))]
    (copy,) = plan([BoxTarget("w", "w", ((2, 6),), ((10, 14),))], {"w": halves})
    assert copy == BoxCopy("w", "w", 2, ((0, 8),), ((2, 6),), ((10, 14),))
    sources = [PartBox(part, ((4 * part, 4 * part + 4), (0, 8))) for part in range(500)]
    copies = plan([BoxTarget("w", "w", ((398, 1602), (2, 6)), ((0, 1204), (0, 4)))], {"w": sources})
    assert [copy.part for copy in copies] == list(range(99, 401))
    assert sum(count_of(copy.put) for copy in copies) == 1204 * 4


# -- which rank of a mesh publishes which blocks: the bytes are spread over ranks that hold the same


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

    loads = [
        sum(
            placed[name].dtype.itemsize * count_of(box)
            for name, each in given(placed).blocks.items()
            for box, _ in each
        )
        for placed in placed_on_each_rank(8, state)
    ]
    assert sum(loads) == sum(4 * 16 * (64 + 8 * (number % 5)) for number in range(40))
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


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


def test_what_cannot_be_given_or_placed_is_refused_by_name() -> None:
    with as_rank(3, 4):
        placed = {"w": place("w", on(DeviceMesh("cpu", [0, 1]), 1))}
    assert placed["w"].blocks == ()
    with pytest.raises(Mismatch, match="'w' lies on a mesh of 2 ranks out of 2 without this rank"):
        given(placed)
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        wrong = DTensor.from_local(torch.ones(5), mesh, (Shard(0),), shape=torch.Size([6]), stride=(1,))
        with pytest.raises(Mismatch, match=r"'w': its placements .* give this rank \(3,\) of \(6,\), .* has \(5,\)"):
            place("w", wrong)
    with as_rank(14, 16):
        mesh = init_device_mesh("cpu", (4, 4))
        how = (_StridedShard(0, split_factor=4), Shard(0))
        shape = torch.Size([38])
        sharded = DTensor.from_local(torch.tensor([29]), mesh, how, run_check=False, shape=shape, stride=(1,))
        with pytest.raises(Unsupported, match=r"'w', of shape \(38,\), which mesh of 4x4 ranks out of 16 does not"):
            place("w", sharded)
