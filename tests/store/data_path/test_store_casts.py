"""Casts on the wire: their stated bounds hold for all numbers of all dtypes, and what is special stays special."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.codecs import float8_blocks as fp8
from holdfast.store.casts.wire_cast import EncodedTensor, WireCast

WIDTHS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}


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


@given(numbers(list(WIDTHS)))
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


def test_numbers_too_large_or_too_small_for_the_target_become_its_largest_and_zero() -> None:
    source = torch.tensor([[1e300, -1e300] + 126 * [0.0] + [1e-300, -1e-300]], dtype=torch.float64)
    codes, exponents = torch.empty(source.shape, dtype=torch.float8_e4m3fn), torch.empty((1, 2), dtype=torch.int16)
    fp8.encode(source, codes, exponents)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        into = torch.empty(source.shape, dtype=dtype)
        fp8.decode(codes, exponents, into, 0, fp8.BLOCK)
        limit = torch.finfo(dtype).max
        assert into[0].tolist() == [limit, -limit] + 126 * [0.0] + [0.0, -0.0]


@given(numbers([torch.float32, torch.float64]))
def test_bf16_keeps_its_bound(source: torch.Tensor) -> None:
    found, wanted = there_and_back(WireCast.BF16, source).double(), source.double()
    small = wanted.abs() < 3.3961e38
    error, bound = (found - wanted).abs()[small], (wanted.abs() / 256).clamp(min=2.0**-134)[small]
    assert bool((error <= bound).all())
    assert torch.equal(found.isnan(), wanted.isnan())
    large = wanted.abs() >= 3.3962e38
    assert torch.equal(found[large], torch.copysign(torch.full_like(wanted[large], math.inf), wanted[large]))


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_zeros_keep_their_sign(dtype: torch.dtype) -> None:
    source = torch.tensor([0.0, -0.0, 1.0, -0.0], dtype=dtype)
    for cast in WireCast:
        if cast.shrinks(dtype, (4,)):
            assert torch.equal(there_and_back(cast, source).view(torch.uint8), source.view(torch.uint8))


@given(numbers(list(WIDTHS)))
def test_a_cast_carries_a_tensor_whose_finite_and_infinite_elements_stay_such(source: torch.Tensor) -> None:
    for cast in WireCast:
        if cast.shrinks(source.dtype, source.shape):
            found = there_and_back(cast, source)
            same = torch.equal(found.isinf(), source.isinf()) and torch.equal(found.isnan(), source.isnan())
            assert cast.carries(source) == same
            assert torch.equal(there_and_back(cast, found).nan_to_num(), found.nan_to_num()), "a cast of a cast"


def test_the_largest_numbers_stay_finite_in_fp8() -> None:
    for dtype in WIDTHS:
        source = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
        assert bool(there_and_back(WireCast.FP8, source).isfinite().all())


def test_fp8_keeps_its_bound_where_denormals_count_as_zero() -> None:
    source = torch.tensor([448.0, 2.0**-9, -(2.0**-8), 3.0, 0.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        found = there_and_back(WireCast.FP8, source)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, source), "all of them are numbers of e4m3"


def test_a_tensor_is_cast_if_that_takes_fewer_bytes() -> None:
    def shrunk(cast: WireCast, *shape: int) -> set[torch.dtype]:
        return {dtype for dtype in [*WIDTHS, torch.float8_e4m3fn, torch.int64] if cast.shrinks(dtype, shape)}

    assert shrunk(WireCast.BF16, 128) == {torch.float32, torch.float64}
    assert shrunk(WireCast.FP8, 128) == set(WIDTHS)
    assert shrunk(WireCast.FP8, 64, 2) == {torch.float32, torch.float64}, "rows of two have as many bytes of scales"
    assert shrunk(WireCast.FP8, 0, 128) == set()
