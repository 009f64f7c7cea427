"""A rank has the blocks that torch gives it; a plan copies each element once, between any layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.ft.state.boxes import count_of, cover, shape_of, whole
from holdfast.store.reshard.placements import Blocks, LocalBlock, blocks_of, cuts_of, in_cutting_order, local_shape
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, PartBox, plan
from support.weights.layouts import Shape, Sizes, at, coordinates, meshes, part, placements, shapes, torchs_local


@given(meshes, shapes, st.data())
def test_the_blocks_of_every_rank_are_what_torch_gives_it(sizes: Sizes, shape: Shape, data: st.DataObject) -> None:
    placed = data.draw(placements(sizes, len(shape)))
    cuts = cuts_of("w", placed, len(shape))
    tensor = torch.arange(math.prod(shape)).view(shape)
    for place in coordinates(sizes):
        local = torchs_local(tensor, placed, sizes, place)
        assert local_shape(shape, cuts, sizes, place) == tuple(local.shape)
        seen = torch.zeros_like(local)
        for box, there in blocks_of(shape, cuts, sizes, place):
            assert torch.equal(part(local, there), part(tensor, box))
            part(seen, there).add_(1)
        assert (seen == 1).all()


def test_negative_dimensions_count_from_the_end() -> None:
    placed = (_StridedShard(-2, split_factor=2), Replicate(), Shard(-1))
    assert cuts_of("w", placed, 3) == cuts_of("w", (_StridedShard(1, split_factor=2), Replicate(), Shard(2)), 3)


def test_fsdp_over_tensor_parallel_is_one_box_and_free_chunks_are_several() -> None:
    both = cuts_of("w", (_StridedShard(0, split_factor=2), Shard(0)), 1)
    assert blocks_of((8,), both, (2, 2), (1, 0)) == (LocalBlock(((2, 4),), ((0, 2),)),)
    free = cuts_of("w", (_StridedShard(0, split_factor=2),), 1)
    assert blocks_of((8,), free, (2,), (1,)) == (LocalBlock(((2, 4),), ((0, 2),)), LocalBlock(((6, 8),), ((2, 4),)))


def test_a_tensor_without_elements_has_an_empty_block_everywhere_and_an_empty_shard_has_none() -> None:
    cuts = cuts_of("w", (Shard(0),), 2)
    assert blocks_of((0, 3), cuts, (2,), (1,)) == (LocalBlock(((0, 0), (0, 3)), ((0, 0), (0, 3))),)
    assert blocks_of((1, 0), cuts, (2,), (1,)) == (LocalBlock(((0, 0), (0, 0)), ((0, 0), (0, 0))),)
    assert blocks_of((1, 3), cuts, (2,), (1,)) == ()


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ((Partial(),), r"'w' is placed as .*: ranks hold summands of it, no elements; all-reduce it first"),
        ((Shard(0), Partial("max")), r"summands"),
        ((_MaskPartial("sum"),), r"summands"),
        ((Shard(2),), r"it has 2 dimensions"),
        ((Shard(-3),), r"it has 2 dimensions"),
    ],
)
def test_placements_without_elements_are_refused_by_name(placed: tuple[Any, ...], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        cuts_of("w", placed, 2)


def test_a_placement_of_another_library_is_refused_by_its_name() -> None:
    class Interleaved(Shard):
        pass

    with pytest.raises(Unsupported, match=r"'w' is placed as .*: Interleaved is not known here"):
        cuts_of("w", (Interleaved(0),), 2)


@given(meshes, st.integers(0, 40), st.data())
def test_the_order_of_fully_shard_differs_in_uneven_tensors_only(
    sizes: Sizes, length: int, data: st.DataObject
) -> None:
    """`fully_shard` cuts what tensor parallelism has cut; its placement says chunks that stand for that cut."""
    sizes = (*sizes[:1], data.draw(st.integers(1, 8 // sizes[0])))
    cuts = cuts_of("w", (_StridedShard(0, split_factor=sizes[1]), Shard(0)), 1)
    order = in_cutting_order(cuts, sizes)
    assert order is not None
    tensor = torch.arange(length)
    for place in coordinates(sizes):
        tensor_parallel = torchs_local(tensor, (Shard(0),), sizes[1:], place[1:])
        local = torchs_local(tensor_parallel, (Shard(0),), sizes[:1], place[:1])
        assert [i for box, _ in blocks_of((length,), order, sizes, place) for i in range(*box[0])] == local.tolist()
        if length % math.prod(sizes) == 0 and length:
            assert blocks_of((length,), order, sizes, place) == blocks_of((length,), cuts, sizes, place)


def test_chunks_that_stand_for_no_cut_have_no_other_order() -> None:
    assert in_cutting_order(cuts_of("w", (_StridedShard(0, split_factor=3), Shard(0)), 1), (2, 2)) is None


@given(st.data(), st.integers(0, 3))
def test_a_cover_takes_each_element_once_from_the_first_box_that_has_it(data: st.DataObject, dims: int) -> None:
    pairs = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda p: (min(p), max(p)))] * dims)
    wanted, boxes = data.draw(pairs), data.draw(st.lists(pairs, max_size=5))
    owner = torch.full((4,) * dims, -1)
    for number, box in reversed(list(enumerate(boxes))):
        part(owner, box).fill_(number)
    taken, left = cover(wanted, boxes)
    seen = torch.full((4,) * dims, -2)
    for number, box in [*taken, *((-1, box) for box in left)]:
        assert (part(seen, box) == -2).all()
        part(seen, box).fill_(number)
    assert torch.equal(part(seen, wanted), part(owner, wanted))
    assert sum(count_of(box) for _, box in taken) + sum(map(count_of, left)) == count_of(wanted)


def targets(blocks: Mapping[str, Blocks]) -> list[BoxTarget]:
    return [BoxTarget(name, name, *block) for name, each in blocks.items() for block in each]


@given(shapes, meshes, meshes, st.data())
def test_any_layout_is_filled_from_any_other(shape: Shape, before: Sizes, after: Sizes, data: st.DataObject) -> None:
    full = np.arange(math.prod(shape)).reshape(shape)
    old = cuts_of("w", data.draw(placements(before, len(shape))), len(shape))
    new = cuts_of("w", data.draw(placements(after, len(shape))), len(shape))
    sources = [
        PartBox(part, block.box)
        for part, place in enumerate(coordinates(before))
        for block in blocks_of(shape, old, before, place)
    ]
    for reader, place in enumerate(coordinates(after)):
        blocks = blocks_of(shape, new, after, place)
        local = np.full(local_shape(shape, new, after, place), -1)
        copies = plan(targets({"w": blocks}), {"w": sources}, reader)
        for copy in copies:
            assert PartBox(copy.part, copy.source) in sources
            assert (local[at(copy.put)] == -1).all(), "an element is copied twice"
            local[at(copy.put)] = full[at(copy.source)][at(copy.take)]
        for box, there in blocks:
            assert np.array_equal(local[at(there)], full[at(box)])


@given(st.integers(1, 3), st.data())
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


def test_one_error_lists_all_that_is_missing() -> None:
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


def test_a_long_list_of_faults_is_cut() -> None:
    with pytest.raises(Mismatch, match=r"'19'; and 980 more$"):
        plan([BoxTarget(str(number), str(number), (), ()) for number in range(1000)], {})


def test_the_parts_that_have_a_replica_share_the_load() -> None:
    box = whole((10, 10))
    sources = {str(number): [PartBox(part, box) for part in range(4)] for number in range(40)}
    wanted = targets({name: (LocalBlock(box, box),) for name in sources})
    assert Counter(copy.part for copy in plan(wanted, sources)) == dict.fromkeys(range(4), 10)
    assert [plan(wanted[:1], sources, reader)[0].part for reader in range(4)] == [0, 1, 2, 3]


def test_a_box_that_has_all_that_is_wanted_is_preferred_to_pieces() -> None:
    halves = [PartBox(0, ((0, 4),)), PartBox(1, ((4, 8),)), PartBox(2, ((0, 8),))]
    (copy,) = plan([BoxTarget("w", "w", ((2, 6),), ((10, 14),))], {"w": halves})
    assert copy == BoxCopy("w", "w", 2, ((0, 8),), ((2, 6),), ((10, 14),))


def test_many_sources_of_one_tensor_are_found() -> None:
    sources = [PartBox(part, ((4 * part, 4 * part + 4), (0, 8))) for part in range(500)]
    copies = plan([BoxTarget("w", "w", ((398, 1602), (2, 6)), ((0, 1204), (0, 4)))], {"w": sources})
    assert [copy.part for copy in copies] == list(range(99, 401))
    assert sum(count_of(copy.put) for copy in copies) == 1204 * 4
