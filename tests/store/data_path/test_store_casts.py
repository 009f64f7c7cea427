"""Casts on the wire: within their stated bounds for all numbers, whole or in boxes, and never unless asked for."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.comms.codecs import float8_blocks as fp8
from holdfast.comms.errors import CorruptData, Mismatch
from holdfast.store import CallCancelled, Slice, WeightStore
from holdfast.store.casts import cast_reader
from holdfast.store.casts.cast_reader import CastVersionReader
from holdfast.store.casts.wire_cast import CastName, EncodedTensor, WireCast
from holdfast.store.catalog import part_casts
from support.samples.store_processes import count_reads
from support.waiting import PATIENCE, eventually
from support.weights.layouts import as_rank

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def there_and_back(cast: WireCast, source: torch.Tensor) -> torch.Tensor:
    shape = cast.exponents(source.shape)
    exponents = None if shape is None else torch.empty(shape, dtype=torch.int16)
    encoded = EncodedTensor(torch.empty(source.shape, dtype=cast.dtype), exponents)
    cast.encode(source, encoded)
    into = torch.empty_like(source)
    cast.decode(encoded, into)
    return into


@st.composite
def numbers(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    """Tensors of any bits, or of numbers of like size, as weights are."""
    dtype = draw(st.sampled_from(dtypes))
    count = draw(st.sampled_from([1, 2, 127, 128, 129, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        data = rng.integers(0, 256, count * dtype.itemsize, np.uint8)
        return torch.from_numpy(data).view(dtype)
    scale = 2.0 ** draw(st.integers(-1060, 1000))
    return torch.from_numpy(rng.normal(size=count) * scale).to(dtype)


@given(numbers(list(FLOATS)))
def test_fp8_keeps_its_bound(source: torch.Tensor) -> None:
    found = there_and_back(WireCast.FP8, source).double()
    wanted = source.double()
    smallest = torch.nextafter(torch.zeros((), dtype=source.dtype), torch.ones((), dtype=source.dtype)).double() / 2
    finite = wanted.isfinite()
    assert torch.equal(found.isnan(), ~finite)
    for start in range(0, len(wanted), fp8.BLOCK):
        block = slice(start, start + fp8.BLOCK)
        x, y = (each[block][finite[block]] for each in (wanted, found))
        if len(x):
            bound = (x.abs() / 16).clamp(min=float(x.abs().max()) / 2**17)
            # a result that is a denormal of the tensor's own dtype is rounded once more
            assert bool(((y - x).abs() <= bound + smallest).all())


@given(numbers([torch.float16, torch.bfloat16, torch.float32]), st.sampled_from([1, 2, 3]))
def test_the_compiled_code_of_fp8_gives_the_bits_that_torch_gives(source: torch.Tensor, rows: int) -> None:
    """float64, to which all others convert exactly, is encoded and decoded with torch's own float8."""
    source = source[: len(source) // rows * rows].view(rows, -1)
    if not source.numel():
        return
    found = []
    for each in (source, source.double()):
        codes = torch.empty(each.shape, dtype=torch.float8_e4m3fn)
        exponents = torch.empty((rows, fp8.blocks_of(each.shape[1])), dtype=torch.int16)
        fp8.encode(each, codes, exponents)
        found.append((codes, exponents))
    assert torch.equal(found[0][0].view(torch.uint8), found[1][0].view(torch.uint8))
    assert torch.equal(found[0][1], found[1][1])
    block = min(fp8.BLOCK, source.shape[1])
    one, other = torch.empty(source.shape), torch.empty(source.shape, dtype=torch.float64)
    fp8.decode(*found[0], one, 0, block)
    fp8.decode(*found[1], other, 0, block)
    limit = torch.finfo(torch.float32).max
    assert torch.equal(one.nan_to_num(7.0), other.clamp(-limit, limit).float().nan_to_num(7.0))


def test_fp8_keeps_its_bound_at_the_ends_of_a_dtype_and_where_denormals_count_as_zero() -> None:
    source = torch.tensor([[1e300, -1e300] + 126 * [0.0] + [1e-300, -1e-300]], dtype=torch.float64)
    codes, exponents = torch.empty(source.shape, dtype=torch.float8_e4m3fn), torch.empty((1, 2), dtype=torch.int16)
    fp8.encode(source, codes, exponents)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        into = torch.empty(source.shape, dtype=dtype)
        fp8.decode(codes, exponents, into, 0, fp8.BLOCK)
        limit = torch.finfo(dtype).max
        assert into[0].tolist() == [limit, -limit] + 126 * [0.0] + [0.0, -0.0]
    source = torch.tensor([448.0, 2.0**-9, -(2.0**-8), 3.0, 0.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        found = there_and_back(WireCast.FP8, source)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, source), "all of them are numbers of e4m3"


@given(numbers([torch.float32, torch.float64]))
def test_bf16_keeps_its_bound(source: torch.Tensor) -> None:
    found, wanted = there_and_back(WireCast.BF16, source).double(), source.double()
    small = wanted.abs() < 3.3961e38
    error, bound = (found - wanted).abs()[small], (wanted.abs() / 256).clamp(min=2.0**-134)[small]
    assert bool((error <= bound).all())
    assert torch.equal(found.isnan(), wanted.isnan())
    large = wanted.abs() >= 3.3962e38
    assert torch.equal(found[large], torch.copysign(torch.full_like(wanted[large], math.inf), wanted[large]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_keep_their_sign_and_the_largest_stay_finite_in_fp8(dtype: torch.dtype) -> None:
    source = torch.tensor([0.0, -0.0, 1.0, -0.0], dtype=dtype)
    for cast in WireCast:
        if cast.shrinks(dtype, (4,)):
            assert torch.equal(there_and_back(cast, source).view(torch.uint8), source.view(torch.uint8))
    most = torch.finfo(dtype).max
    assert bool(there_and_back(WireCast.FP8, torch.tensor([most, -most], dtype=dtype)).isfinite().all())


@given(numbers(list(FLOATS)))
def test_a_cast_carries_a_tensor_whose_finite_and_infinite_elements_stay_such(source: torch.Tensor) -> None:
    for cast in WireCast:
        if cast.shrinks(source.dtype, source.shape):
            found = there_and_back(cast, source)
            same = torch.equal(found.isinf(), source.isinf()) and torch.equal(found.isnan(), source.isnan())
            assert cast.carries(source) == same
            assert torch.equal(there_and_back(cast, found).nan_to_num(), found.nan_to_num()), "a cast of a cast"


def test_a_tensor_is_cast_if_that_takes_fewer_bytes() -> None:
    def shrunk(cast: WireCast, *shape: int) -> set[torch.dtype]:
        return {dtype for dtype in [*FLOATS, torch.float8_e4m3fn, torch.int64] if cast.shrinks(dtype, shape)}

    assert shrunk(WireCast.BF16, 128) == {torch.float32, torch.float64}
    assert shrunk(WireCast.FP8, 128) == set(FLOATS)
    assert shrunk(WireCast.FP8, 64, 2) == {torch.float32, torch.float64}, "rows of two have as many bytes of scales"
    assert shrunk(WireCast.FP8, 0, 128) == set()


CASTS: tuple[CastName, ...] = ("bf16", "fp8")


def forms(store: WeightStore, version: int = 1) -> list[tuple[int, str, int]]:
    """Part, cast and size of each form that the catalogue lists."""
    return [
        (shard.part, form.cast, form.handle.nbytes)
        for shard in store._catalog_client.read()[1].version(version).shards
        for form in shard.casts
        if form.handle is not None
    ]


UNUSUAL = (math.inf, -math.inf, math.nan, 3.4e38, -3.4e38)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of many shapes and dtypes; some have elements that a cast cannot carry."""
    shape = draw(st.sampled_from([(), (1,), (3,), (200,), (5, 3), (4, 130), (2, 3, 129), (2, 300), (0, 4), (600, 256)]))
    dtype = draw(st.sampled_from([*FLOATS, torch.int64, torch.bool, torch.uint8]))
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if dtype.is_floating_point:
        unusual = draw(st.lists(st.sampled_from(UNUSUAL), max_size=min(2, values.numel())))
        values.view(-1)[-len(unusual) :] = torch.tensor(unusual or values.view(-1).tolist(), dtype=torch.float64)
    return values.to(dtype)


@given(st.dictionaries(st.sampled_from("abcdef"), tensors(), min_size=1), st.sampled_from(CASTS))
def test_what_a_cast_shrinks_is_cast_and_all_else_is_exact(state: dict[str, torch.Tensor], cast: CastName) -> None:
    """A tensor with an element that the cast cannot carry arrives as it is; those beside it do not."""
    with WeightStore("memory://casts") as store:
        store.publish(1, state)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        store.get(1, into, cast=cast)
        loaded = store.load(1, cast=cast)
        with cast_here():
            here = store.load(1, cast=cast)
        code = WireCast(cast)
        if not any(code.shrinks(tensor.dtype, tensor.shape) for tensor in state.values()):
            assert forms(store) == []
        for name, tensor in state.items():
            has_form = tensor.is_floating_point() and code.shrinks(tensor.dtype, tensor.shape) and code.carries(tensor)
            wanted = there_and_back(code, tensor) if has_form else tensor
            for found in (into, loaded, here):
                torch.testing.assert_close(found[name], wanted, rtol=0, atol=0, equal_nan=True)


@contextmanager
def cast_here() -> Iterator[None]:
    """No form can be had, so readers read parts whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CastVersionReader, "_form", lambda *_: None)
        yield


@given(st.lists(st.sampled_from(UNUSUAL), max_size=2), st.sampled_from(CASTS), st.sampled_from(FLOATS))
def test_no_box_or_dtype_makes_an_infinity_or_a_nan(unusual: list[float], cast: CastName, dtype: torch.dtype) -> None:
    wanted = torch.randn(2, 300, dtype=torch.float64).to(dtype)
    wanted[1, 3 : 3 + len(unusual)] = torch.tensor(unusual, dtype=dtype)
    with WeightStore("memory://unusual") as store:
        store.publish(1, {"unusual": wanted})
        row = store.load(1, {"unusual": Slice((1, 2), (1, 40))}, cast=cast)["unusual"]
        if dtype.itemsize > 2:
            halved = {"unusual": torch.zeros(2, 300, dtype=torch.bfloat16)}
            store.get(1, halved, cast=cast)
            assert torch.equal(halved["unusual"].isnan(), wanted.isnan())
    assert torch.equal(row.isnan(), wanted[1:, 2:42].isnan()) and torch.equal(row.isinf(), wanted[1:, 2:42].isinf())


@given(st.data(), st.sampled_from(CASTS), st.sampled_from([0, 1]))
def test_boxes_of_boxes_are_those_of_the_whole(data: st.DataObject, cast: CastName, dim: int) -> None:
    """Parts cut rows, or blocks of scales; readers cut again, along both dimensions."""
    full = torch.randn(12, 700, generator=torch.Generator().manual_seed(1))
    with WeightStore("memory://boxes") as store:
        for rank in range(3):
            with as_rank(rank, 3):
                mesh = init_device_mesh("cpu", (3,))
                store.publish(1, {"w": distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)})
        read = store.load(1, cast=cast)["w"]
        most = full.abs().amax(-1, keepdim=True) / 2**17
        bound = full.abs() / 256 if cast == "bf16" else torch.maximum(full.abs() / 16, most)
        assert bool(((read - full).abs() <= bound).all()) and not torch.equal(full, read)
        with cast_here():
            assert torch.equal(store.load(1, cast=cast)["w"], read)
        low = [data.draw(st.integers(0, size - 1)) for size in full.shape]
        sides = [data.draw(st.integers(1, size - at)) for at, size in zip(low, full.shape, strict=True)]
        box = tuple(slice(at, at + side) for at, side in zip(low, sides, strict=True))
        wanted = {"w": Slice(tuple(low), tuple(sides))}
        assert torch.equal(store.load(1, wanted, cast=cast)["w"], read[box])
        with cast_here():
            assert torch.equal(store.load(1, wanted, cast=cast)["w"], read[box])


def test_targets_of_any_strides_and_meshes_tied_ones_and_atomic_reads_take_a_cast(store: WeightStore) -> None:
    full = torch.randn(6, 256)
    store.publish(1, {"w": full})
    for cast in CASTS:
        read = store.load(1, cast=cast)["w"]
        turned = torch.zeros(256, 6).t()
        store.get(1, {"w": turned}, cast=cast)
        assert torch.equal(turned, read)
        with as_rank(1, 2):
            mesh = init_device_mesh("cpu", (2,))
            shard = distribute_tensor(torch.zeros(6, 256), mesh, [Shard(1)], src_data_rank=None)
            store.get(1, {"w": shard}, cast=cast)
            assert torch.equal(shard.to_local(), read[:, 128:])
    shared = torch.randn(30, 50)
    store.publish(2, {"embed": shared, "head": shared, "steps": 7})
    target = torch.zeros(30, 50)
    for atomic in (False, True):
        into = {"embed": target, "head": target, "steps": 0}
        store.get(2, into, cast="bf16", atomic=atomic)
        assert torch.equal(target, shared.bfloat16().float()) and into["steps"] == 7
        target.zero_()
    found = store.load(2, cast="bf16")
    assert found["embed"].data_ptr() == found["head"].data_ptr()


def test_tensors_are_decoded_in_batches_and_cast_if_asked(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{number}": torch.randn(number, 40) for number in range(1, 9)}
    store.publish(1, state)
    store.load(1)
    assert forms(store) == [], "casts are never implied"
    at_once = store.load(1, cast="fp8")
    listed = forms(store)
    monkeypatch.setattr(cast_reader, "BATCH_ELEMENTS", 500)
    batches = store.load(1, cast="fp8")
    assert all(torch.equal(batches[name], at_once[name]) for name in state)
    assert len(listed) == 1 and forms(store) == listed


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float32_fills_targets_of_other_floating_point_dtypes(store: WeightStore, dtype: torch.dtype) -> None:
    """The target keeps its dtype; what arrives is rounded to it."""
    store.publish(1, {"w": torch.randn(4, 300), "none": torch.zeros(0, 3), "half": torch.randn(8).half()})
    for cast in CASTS:
        read = store.load(1, cast=cast)
        into = {"w": torch.zeros(4, 300, dtype=dtype), "none": torch.zeros(0, 3, dtype=dtype), "half": read["half"]}
        store.get(1, into, cast=cast)
        assert torch.equal(into["w"], read["w"].to(dtype))
        with pytest.raises(Mismatch, match=r"the version has half float16\[8\], `into` has half int16"):
            store.get(1, into | {"half": torch.zeros(8, dtype=torch.int16)}, cast=cast)
    if dtype != torch.float32:
        with pytest.raises(Mismatch, match="the version has w float32"):
            store.get(1, into)


def test_bad_arguments_are_refused(store: WeightStore) -> None:
    store.publish(1, {"w": torch.ones(4)})
    with pytest.raises(ValueError, match="leave out cast='fp8'"):
        store.load(1, map=True, cast="fp8")
    for call in (store.get, store.follow):
        with pytest.raises(ValueError, match="one of 'bf16', 'fp8', not 'int8'"):
            call(*([1] if call == store.get else []), into={"w": torch.ones(4)}, cast="int8")  # type: ignore[operator]
    with pytest.raises(Mismatch, match=r"the version has w float32\[4\], `into` has w float32\[5\]"):
        store.get(1, {"w": torch.ones(5)}, cast="fp8")
    assert forms(store) == [], "nothing is packed for a reader whose tensors do not fit"


def test_the_memory_of_a_cast_counts_and_goes_with_its_version(store: WeightStore) -> None:
    store.publish(1, {"w": torch.randn(1 << 18)})
    pool = store._replica_holder.pool
    before = pool.used
    store.load(1, cast="bf16")
    assert pool.used - before >= 1 << 19
    store.delete(1)
    eventually(lambda: pool.used == 0)


def test_a_form_that_has_no_room_is_left_to_the_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store has room for two versions of a megabyte, and no more."""
    with WeightStore(f"memory://{tmp_path}/tight", limit=(2 << 20) + (256 << 10)) as tight:
        for version in (1, 2):
            tight.publish(version, {"w": torch.full((1 << 18,), float(version) / 3)})
        into = {"w": torch.zeros(1 << 18)}
        tight.get(2, into, cast="bf16")
        assert into["w"].unique().tolist() == [float(torch.tensor(2 / 3).bfloat16())] and forms(tight, 2) == []
        assert "is read whole, and cast here" in caplog.text
        tight.delete(1)
        tight.get(2, into, cast="bf16")
        assert len(forms(tight, 2)) == 1, "the next reader asks anew"


def test_parts_that_the_reader_casts_are_logged_together(store: WeightStore, caplog: pytest.LogCaptureFixture) -> None:
    for part in (0, 1):
        store.publish(1, {f"w{part}": torch.ones(1000)}, part=part, parts=2)
    with cast_here():
        store.load(1, cast="bf16")
    (message,) = [each for each in caplog.messages if "cast here" in each]
    assert message.startswith("version 1 part 0, 1 is read whole")


def test_a_get_that_waits_for_a_form_can_be_cancelled(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(*_: object) -> None:
        raise CallCancelled("a get")

    store.publish(1, {"w": torch.ones(1000)})
    into = {"w": torch.zeros(1000)}
    monkeypatch.setattr(part_casts, "request_cast", cancelled)
    with pytest.raises(CallCancelled) as raised:
        store.get(1, into, cast="bf16")
    assert raised.value.mixed == () and into["w"]._version == 0


@pytest.mark.parametrize("fault", ["wrong bytes", "gone"])
def test_a_form_that_cannot_be_read_is_not_needed_and_packed_anew(store: WeightStore, fault: str) -> None:
    store.publish(1, {"w": torch.ones(1000, 1000)})
    store.load(1, cast="fp8")
    (before,) = store._replica_holder._casts._kept.values()
    if fault == "gone":
        before.region.close()
    else:
        before.memory[500_000] ^= 1
    for _ in range(2):
        assert store.load(1, cast="fp8")["w"].unique().tolist() == [1.0]
    (after,) = store._replica_holder._casts._kept.values()
    assert after is not before


def test_a_replica_with_wrong_bytes_is_not_cast(store: WeightStore) -> None:
    store.publish(1, {"w": torch.ones(1000, 1000)})
    (kept,) = store._replica_holder._kept.values()
    kept.memory[1_000_000] ^= 1
    with pytest.raises(CorruptData):
        store.load(1, cast="bf16")
    assert forms(store) == []


def test_a_follower_takes_a_cast(store: WeightStore) -> None:
    into = {"w": torch.zeros(512)}
    with store.follow(into, cast="bf16") as follower:
        for version in (1, 2):
            values = torch.randn(512)
            store.publish(version, {"w": values})
            assert follower.catch_up() == version
            assert torch.equal(into["w"], values.bfloat16().float())


# -- the bytes that are moved


@pytest.mark.parametrize(("cast", "share"), [("bf16", 1 / 2), ("fp8", 1 / 4 + 1 / 256)])
def test_a_half_or_a_quarter_of_the_bytes_is_moved_where_nothing_is_mapped(
    store: WeightStore, unmapped: None, monkeypatch: pytest.MonkeyPatch, cast: CastName, share: float
) -> None:
    """All of them until a holder has packed it: then the reader casts what it gets, to the same bits."""
    may_pack, encode = threading.Event(), WireCast.encode

    def waiting(cast: WireCast, source: torch.Tensor, into: EncodedTensor) -> None:
        assert threading.current_thread() is threading.main_thread() or may_pack.wait(PATIENCE)
        encode(cast, source, into)

    def bytes_of(cast: CastName | None) -> tuple[int, torch.Tensor]:
        sizes, into = count_reads(store._plane), {"w": torch.zeros(1 << 12, 256)}
        store.get(1, into, cast=cast)
        return sum(sizes), into["w"]

    monkeypatch.setattr(WireCast, "encode", waiting)
    monkeypatch.setattr(cast_reader, "PACK_SECONDS", 0.3)
    values = torch.randn(1 << 12, 256)
    store.publish(1, {"w": values})
    whole, exact = bytes_of(None)
    assert torch.equal(exact, values)
    moved, cast_here = bytes_of(cast)
    assert moved / whole == pytest.approx(1.0, rel=0.02) and not torch.equal(cast_here, values)
    may_pack.set()
    eventually(lambda: forms(store) != [])
    moved, found = bytes_of(cast)
    assert moved / whole == pytest.approx(share, rel=0.02) and torch.equal(found, cast_here)
