"""The plan of a read copies each element once, from any layout to any other.

Parts share the load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import Mismatch
from holdfast.ft.state.boxes import count_of, shape_of, whole
from holdfast.store.reshard.placements import Blocks, LocalBlock, blocks_of, cuts_of, local_shape
from holdfast.store.reshard.plan import BoxCopy, BoxTarget, PartBox, plan
from support.weights.layouts import Shape, Sizes, at, coordinates, meshes, placements, shapes


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
