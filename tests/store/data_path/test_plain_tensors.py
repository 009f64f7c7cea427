"""State dicts of plain tensors, the usual ones, are described in one call, and packed and planned without loops.

The result is that of the general way, which takes any tensors.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import Mismatch
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.ft.state.boxes import whole
from holdfast.store import WeightStore
from holdfast.store.data.digests import PartPlan
from holdfast.store.data.manifest import LARGE_BYTES, PIECE_BYTES
from holdfast.store.data.packing import PackedPart, PartBlock, pack, pack_plain
from holdfast.store.read.read_plan import local_tensor, plan_named, plan_read
from holdfast.store.reshard.plan import BoxTarget

State = dict[str, torch.Tensor]
SIZES = (0, 1, 100, 4096, LARGE_BYTES // 4 - 1, LARGE_BYTES // 4, PIECE_BYTES // 4 + 5)


@st.composite
def states(draw: st.DrawFn) -> State:
    """State dicts with small, large and empty tensors of float32."""
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12))
    names = draw(st.permutations([f"w{number}" for number in range(len(sizes))]))
    return {name: torch.randn(size) for name, size in zip(names, sizes, strict=True)}


def packed(state: State) -> PackedPart:
    plain = PlainTensors.of(state)
    assert plain is not None
    return pack_plain(state, plain, b"", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))


@given(states())
def test_plain_tensors_are_packed_like_any_others(state: State) -> None:
    blocks = [PartBlock(name, each, tuple(each.shape)) for name, each in sorted(state.items())]
    usual, general = packed(state), pack(blocks, b"", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    assert usual.digest == general.digest
    assert torch.equal(usual.memory[: usual.nbytes], general.memory[: general.nbytes])


def copies_of(plan: PartPlan) -> Counter[tuple[int, ...]]:
    """All that a plan copies: (piece, target, source, target's byte, bytes)."""
    found: Counter[tuple[int, ...]] = Counter()
    for piece, job, target in zip(plan.pieces.tolist(), plan.jobs.tolist(), plan.job_targets.tolist(), strict=True):
        source, nbytes, into, first, count = job
        if target >= 0:
            found[(piece, target, source, into, nbytes)] += 1
        for at in range(first, first + count):
            row_source, row_target, rows, row_bytes, *_ = plan.copies[at].tolist()
            assert rows == 1
            found[(piece, int(plan.copy_targets[at]), row_source, row_target, row_bytes)] += 1
    return found


@given(states(), st.data())
def test_whole_tensors_are_planned_as_boxes_are(state: State, data: st.DataObject) -> None:
    layout = packed(state).manifest.layout
    names = data.draw(st.lists(st.sampled_from(sorted(state)), unique=True))
    into = tuple((f"my {name}", local_tensor(state[name])) for name in names)
    wanted = tuple(BoxTarget(f"my {name}", name, *[whole(state[name].shape)] * 2) for name in names)
    general = plan_read((layout, packed({"other": torch.zeros(1)}).manifest.layout), wanted, into)[0]
    named = plan_named(layout, tuple(names))
    assert named is not None and plan_read((layout,), wanted, into) == (named,)
    assert copies_of(named) == copies_of(general)
    assert np.array_equal(named.pieces, general.pieces)
    assert plan_named(layout, (*names, "not there")) is None
    assert not names or plan_named(layout, (*names, names[0])) is None


def test_parts_of_tensors_and_strided_targets_are_planned_as_boxes() -> None:
    layout = packed({"w": torch.randn(4, 6)}).manifest.layout
    box, half = whole((4, 6)), ((0, 2), (0, 6))
    dense, wide = local_tensor(torch.zeros(4, 6)), local_tensor(torch.zeros(4, 7)[:, :6])
    named = plan_named(layout, ("w",))
    assert plan_read((layout,), (BoxTarget("w", "w", box, box),), (("w", dense),)) == (named,)
    for wanted, memory in ((half, dense), (box, wide)):
        (boxes,) = plan_read((layout,), (BoxTarget("w", "w", wanted, wanted),), (("w", memory),))
        assert boxes is not named


def test_equal_forms_are_equal_dtypes_and_shapes() -> None:
    """DLPack, which describes the tensors, does not tell int4 from int8."""
    dtypes = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
    forms: dict[bytes, torch.dtype] = {}
    for dtype in dtypes:
        if dtype.is_complex or "q" in str(dtype):
            continue
        plain = PlainTensors.of({"w": torch.empty(4, dtype=dtype)})
        if plain is not None:
            assert forms.setdefault(plain.forms, dtype) == dtype
    shapes = [(), (0,), (1,), (2, 3), (3, 2), (6,), (1, 6)]
    described = {PlainTensors.of({"w": torch.empty(shape)}) for shape in shapes}
    assert len({each.forms for each in described if each is not None}) == len(shapes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(8)[::2],
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
        torch.nn.Parameter(torch.zeros(3)),
    ],
)
def test_other_tensors_are_not_described(tensor: torch.Tensor) -> None:
    assert PlainTensors.of({"plain": torch.zeros(3), "other": tensor}) is None


def test_shared_memory_is_noticed() -> None:
    base = torch.zeros(10)
    for state, shared in (
        ({"a": base[:5], "b": base[5:]}, False),
        ({"a": base[:6], "b": base[5:]}, True),
        ({"a": base, "b": base[3:3]}, False),
        ({"a": base[8:], "b": base[2:4], "c": base}, True),
    ):
        plain = PlainTensors.of(state)
        assert plain is not None
        assert plain.share_memory == shared


def test_targets_that_fitted_before_are_compared_again_if_anything_about_them_differs() -> None:
    """The check of targets against a version is not repeated for the same memory, only its values are."""
    with WeightStore("memory://plain-targets") as store:
        store.publish(1, {"w": torch.ones(4), "step": 1})
        into = {"w": torch.zeros(4), "step": 0}
        assert store.get(1, into) == 1
        store.publish(2, {"w": torch.full((4,), 2.0), "step": 2})
        assert store.get(2, into) == 2
        assert into["step"] == 2
        assert torch.equal(into["w"], torch.full((4,), 2.0))
        store.publish(3, {"w": torch.ones(2, 2), "step": 3})
        with pytest.raises(Mismatch, match="w"):
            store.get(3, into)
        store.publish(4, {"w": torch.ones(4), "step": 4})
        with pytest.raises(Mismatch, match="w"):
            store.get(4, into | {"w": into["w"].view(2, 2)})
        with pytest.raises(Mismatch, match="w"):
            store.get(4, into | {"w": into["w"].view(torch.int32)})
        with pytest.raises(Mismatch, match="other"):
            store.get(4, into | {"other": torch.zeros(1)})
