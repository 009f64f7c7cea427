"""`WeightStore.load` (new tensors, slices, mapped tensors), the copies that move all bytes, and how they are planned.

State dicts of plain tensors, the usual ones, are described in one call, and packed and planned without loops.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.errors import Mismatch, Unsupported
from holdfast.comms.tensors.memory import PlainTensors
from holdfast.ft.state.boxes import whole
from holdfast.store import NoSuchVersion, Slice, StoreFull, WeightStore
from holdfast.store.data.digests import CALL_BYTES, PartPlan, calls, copy_and_digest
from holdfast.store.data.manifest import LARGE_BYTES, PIECE_BYTES
from holdfast.store.data.packing import PackedPart, PartBlock, pack, pack_plain
from holdfast.store.read.read_plan import Rows, dense_strides, has_rows, local_tensor, plan_named, plan_read, rows_of
from holdfast.store.reshard.plan import BoxTarget
from support.children import Start


def weights(value: float) -> dict[str, torch.Tensor]:
    return {
        "layers.0.weight": torch.full((300_000,), value),
        "layers.1.weight": torch.full((4, 6), value),
        "head": torch.arange(24.0).view(4, 6) + value,
    }


def test_only_the_tensors_and_slices_asked_for_are_loaded(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    assert list(store.load(3, ["head"])) == ["head"]
    assert sorted(store.load("latest", "layers.")) == ["layers.0.weight", "layers.1.weight"]
    loaded = store.load(3, {"head": Slice((1, 2), (2, 3)), "layers.0.weight": Slice((299_999,), (1,))})
    assert torch.equal(loaded["head"], weights(2.0)["head"][1:3, 2:5])
    assert loaded["layers.0.weight"].tolist() == [2.0]


def test_all_that_is_not_there_is_listed_in_one_error(store: WeightStore) -> None:
    store.publish(3, weights(2.0))
    wanted = {"head": Slice((0, 4), (4, 3)), "layers.1.weight": Slice((0,), (2,)), "x": Slice((0,), (1,))}
    with pytest.raises(Mismatch, match=r"no 'x'.*outside of head.*layers\.1\.weight.* has 2 dimensions"):
        store.load(3, wanted)
    with pytest.raises(Mismatch, match="begins with 'nothing'"):
        store.load(3, "nothing")


@pytest.mark.parametrize("chosen", [None, {"head": Slice((1, 2), (2, 3))}])
def test_mapped_tensors_have_the_bytes_of_the_version(store: WeightStore, chosen: dict[str, Slice] | None) -> None:
    store.publish(3, weights(2.0))
    mapped, copied = store.load(3, chosen, map=True), store.load(3, chosen)
    assert all(torch.equal(tensor, copied[name]) for name, tensor in mapped.items())
    mapped["head"].zero_()
    assert torch.equal(store.load(3)["head"], weights(2.0)["head"]), "what is written there stays in this process"


def test_memory_that_is_mapped_is_not_reused_before_it_is_let_go(tmp_path: Path) -> None:
    state = weights(0.0)
    with WeightStore(f"memory://{tmp_path}", keep=1, limit=4_000_000) as store:
        store.publish(1, weights(1.0))
        mapped = store.load(1, map=True)
        for version in (2, 3):
            store.publish(version, weights(float(version)))
            store.get(version, state)
        assert set(mapped["layers.0.weight"].tolist()) == {1.0}
        assert store.versions() == [3]
        also = store.load(3, map=True)
        store.publish(4, weights(4.0))
        with pytest.raises(StoreFull, match="let pins and mapped tensors go"):
            store.publish(5, weights(5.0), timeout=0.2)
        assert store.versions() == [4] and set(also["layers.0.weight"].tolist()) == {3.0}
        del mapped
        store.publish(5, weights(5.0))


def a_holder(pipe: Connection, url: str, plane: str = "auto") -> None:
    with WeightStore(url, plane=plane, replicas=1) as store:
        store.publish(1, weights(2.0))
        pipe.send("published")
        pipe.recv()


def test_mapped_tensors_outlive_their_holder(url: str, start: Start) -> None:
    holder = start(a_holder, url)
    holder.hear()
    with WeightStore(url, hold=False) as reader:
        mapped = reader.load(1, map=True)
        holder.kill()
        with pytest.raises(NoSuchVersion, match="holders are gone"):
            reader.load(1)
        assert set(mapped["layers.0.weight"].tolist()) == {2.0}


def test_a_part_larger_than_the_limit_is_refused_at_once_and_a_plane_that_cannot_map_says_so(tmp_path: Path) -> None:
    with WeightStore(f"memory://{tmp_path}", limit=1_000_000) as store:
        with pytest.raises(StoreFull) as refused:
            store.publish(1, weights(1.0), timeout=60)
        assert refused.value.waited < 1 and refused.value.limit == 1_000_000
        assert store.versions() == []
    with WeightStore(f"memory://{tmp_path}") as store:
        store.publish(1, weights(1.0))
        store._plane.map = lambda *_, **__: (_ for _ in ()).throw(Unsupported("mapping", "read it"))  # type: ignore[assignment]
        with pytest.raises(Unsupported):
            store.load(1, map=True)
        assert torch.equal(store.load(1)["head"], weights(1.0)["head"]), "without a mapping, bytes are read"


# -- over planes that cross hosts


@pytest.mark.parametrize(("plane", "tls"), [("ucx", "tcp,self"), ("nixl", "posix,cma,self")])
def test_readers_of_the_host_map(url: str, start: Start, monkeypatch: pytest.MonkeyPatch, plane: str, tls: str) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    holder = start(a_holder, url, plane)
    assert holder.hear() == "published"
    with WeightStore(url, plane=plane, hold=False) as store:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("it is read, though it can be mapped")

        monkeypatch.setattr(type(store._plane), "read", refuse)
        into = weights(0.0)
        store.get(1, into)
        mapped = store.load(1, map=True)
        assert all(torch.equal(into[name], each) for name, each in weights(2.0).items())
        assert all(torch.equal(mapped[name], each) for name, each in weights(2.0).items())
    monkeypatch.undo()
    holder.tell("close")
    holder.end()


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    source_shift=st.integers(0, 65),
    target_shift=st.integers(0, 65),
    copied=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_pieces_are_copied_and_have_the_checksums_of_xxhash(
    sizes: list[int], source_shift: int, target_shift: int, copied: list[bool]
) -> None:
    source = torch.randint(0, 256, (sum(sizes) + source_shift,), dtype=torch.uint8)[source_shift:]
    target = torch.zeros(sum(sizes) + target_shift + 8, dtype=torch.uint8)
    jobs, at = np.zeros((len(sizes), 5), np.uint64), 0
    expected = target.clone()
    for job, size, is_copied in zip(jobs, sizes, copied, strict=False):
        job[:3] = source.data_ptr() + at, size, (target.data_ptr() + target_shift + at) * is_copied
        if is_copied:
            expected[target_shift + at : target_shift + at + size] = source[at : at + size]
        at += size
    sums = copy_and_digest(jobs)
    assert torch.equal(target, expected)
    ends = np.cumsum([0, *sizes])
    pieces = [source[first:last].numpy() for first, last in itertools.pairwise(ends)]
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in pieces]


def test_large_copies_are_right_with_any_number_of_threads() -> None:
    before, source = torch.get_num_threads(), torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    expected = [xxhash.xxh3_64_intdigest(piece.numpy().data) for piece in source.chunk(20)]
    for threads in (1, 2, 5):
        target, jobs = torch.zeros_like(source), np.zeros((20, 5), np.uint64)
        jobs[:, 0] = source.data_ptr() + np.arange(20) * (2 << 20)
        jobs[:, 1] = 2 << 20
        jobs[:, 2] = target.data_ptr() + np.arange(20) * (2 << 20)
        torch.set_num_threads(threads)
        try:
            assert copy_and_digest(jobs).tolist() == expected
        finally:
            torch.set_num_threads(before)
        assert torch.equal(source, target)


def test_calls_move_about_a_gigabyte_each() -> None:
    jobs = np.zeros((9, 5), np.uint64)
    jobs[:, 1] = [CALL_BYTES // 2] * 4 + [3 * CALL_BYTES] + [1] * 4
    assert [(each.start, each.stop) for each in calls(jobs)] == [(0, 2), (2, 4), (4, 5), (5, 9)]


boxes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=4)


@given(
    box=boxes,
    itemsize=st.sampled_from([1, 2, 4, 8]),
    order=st.permutations(range(4)),
    cuts=st.lists(st.integers(0, 9999)),
)
def test_rows_copy_a_box_out_of_pieces_in_any_division(
    box: list[tuple[int, int, int]], itemsize: int, order: list[int], cuts: list[int]
) -> None:
    """`box` has, along each dimension, a size, and what source and target have besides.

    The target has its dimensions in memory in the given order.
    """
    sizes = [size for size, _, _ in box]
    there = [size + more for size, more, _ in box]
    here = [size + more for size, _, more in box]
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[itemsize]
    source = np.arange(math.prod(there), dtype=dtype).reshape(there)
    order = [each for each in order if each < len(box)]
    target = np.zeros([here[each] for each in order], dtype)
    view = target.transpose(np.argsort(order))
    rows = list(rows_of(sizes, dense_strides(there, itemsize), view.strides, itemsize))
    edges = sorted({0, source.nbytes, *(cut % (source.nbytes + 1) for cut in cuts)})
    flat_source, flat_target = source.reshape(-1).view(np.uint8), memoryview(target).cast("B")
    for first, last in itertools.pairwise(edges):
        for each in rows:
            for part in each.between(first, last):
                _copy(part, flat_source, flat_target, first, last)
    region = tuple(slice(0, size) for size in sizes)
    expected = np.zeros(here, dtype)
    expected[region] = source[region]
    assert np.array_equal(view, expected)


def _copy(rows: Rows, source: np.ndarray, target: memoryview, first: int, last: int) -> None:
    for number in range(rows.rows):
        begin = rows.source + number * rows.source_stride
        assert first <= begin and begin + rows.row_bytes <= last, "a row lies in the piece that it is copied from"
        at = rows.target + number * rows.target_stride
        target[at : at + rows.row_bytes] = source[begin : begin + rows.row_bytes].data


@pytest.mark.parametrize(
    ("target", "straight", "planned"),
    [
        (torch.zeros(2, 70_000).t(), True, 2),
        (torch.zeros(70_000, 2).t(), True, 2),
        (torch.zeros(70_000, 2)[:, 1], True, 1),
        (torch.zeros(8, 100, 256)[:, :, :64], True, 1),
        (torch.zeros(8, 100, 256)[:, :50], True, 1),
        (torch.zeros(256, 300).t(), False, 256),
        (torch.zeros(256, 128, 3, 3).to(memory_format=torch.channels_last), False, 128 * 9),
        (torch.zeros(1, 1, 3).expand(4, 4, 3), False, 1),
    ],
    ids=["tall", "wide", "one column", "part of rows", "some rows", "transposed", "channels last", "expanded"],
)
def test_what_takes_few_rows_is_filled_straight(target: torch.Tensor, straight: bool, planned: int) -> None:
    """The longest dimension is in the rows, and dimensions that follow each other in both memories are one."""
    size, strides = local_tensor(target)
    assert len(list(rows_of(target.shape, dense_strides(target.shape, size), strides, size))) == planned
    assert has_rows(target) == straight


# -- plain tensors, with the result of the general way, which takes any


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
    for cached in (plan_named, plan_read):
        cached.cache_clear()  # one may still have a plan that the other has dropped
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


def test_other_tensors_are_not_described() -> None:
    for tensor in (
        torch.zeros(4, 6).t(),
        torch.zeros(8)[::2],
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
        torch.nn.Parameter(torch.zeros(3)),
    ):
        assert PlainTensors.of({"plain": torch.zeros(3), "other": tensor}) is None, tensor


def test_shared_memory_is_noticed() -> None:
    base = torch.zeros(10)
    for state, shared in (
        ({"a": base[:5], "b": base[5:]}, False),
        ({"a": base[:6], "b": base[5:]}, True),
        ({"a": base, "b": base[3:3]}, False),
        ({"a": base[8:], "b": base[2:4], "c": base}, True),
    ):
        assert PlainTensors.of(state).share_memory == shared


def test_targets_that_fitted_before_are_compared_again_if_anything_about_them_differs(store: WeightStore) -> None:
    """The check of targets against a version is not repeated for the same memory, only its values are."""
    into = {"w": torch.zeros(4), "step": 0}
    for version in (1, 2):
        store.publish(version, {"w": torch.full((4,), float(version)), "step": version})
        assert store.get(version, into) == version == into["step"]
        assert into["w"].tolist() == [version] * 4
    store.publish(3, {"w": torch.ones(2, 2), "step": 3})
    store.publish(4, {"w": torch.ones(4), "step": 4})
    for number, wrong, word in (
        (3, into, "w"),
        (4, into | {"w": into["w"].view(2, 2)}, "w"),
        (4, into | {"w": into["w"].view(torch.int32)}, "w"),
        (4, into | {"other": torch.zeros(1)}, "other"),
    ):
        with pytest.raises(Mismatch, match=word):
            store.get(number, wrong)
    assert into["w"].tolist() == [2.0] * 4 and into["step"] == 2, "nothing changed"
