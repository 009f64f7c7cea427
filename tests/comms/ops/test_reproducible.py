"""Reproducible sums have the same bits however the values are spread over ranks, on any backend."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, ReduceOp, Unsupported
from holdfast.comms.reproducible import exact_sum, scatter_contributions, sum_contributions
from support.comms.ranks import on_ranks, on_ranks_of, second_tier, shared_ranks

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def nasty(contributions: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values of very different sizes that nearly cancel: the bits of a plain sum depend on the order."""
    generator = torch.Generator().manual_seed(contributions * count)
    exponents = torch.randint(-8, 9, (contributions, count), generator=generator).double()
    rows = torch.randn(contributions, count, generator=generator, dtype=torch.float64) * 2.0**exponents
    rows[contributions // 2] = -rows[:2].sum(0)
    return list(rows.to(dtype))


exact_ranks = shared_ranks(3, "inproc-1", "inproc-3", "inproc-8", "shm-3", *second_tier("gloo-3", "ucx-3", "shm-8"))


@on_ranks_of("exact_ranks")
def test_a_sum_has_the_same_bits_however_its_terms_are_distributed(comm: Communicator) -> None:
    spreads = (lambda i: i % comm.size, lambda i: 0, lambda i: (i * i + 1) % comm.size)
    for dtype, count in product(DTYPES, (0, 1, 1001)):
        rows = nasty(8, count, dtype)
        if count > 1:
            rows[0][3], rows[1][3], rows[2][4] = math.inf, -math.inf, math.nan
        for spread in spreads:
            mine = [row for i, row in enumerate(rows) if spread(i) == comm.rank]
            output = torch.empty(count, dtype=dtype)
            sum_contributions(comm, mine, output)
            assert bits(output) == bits(exact_sum(torch.stack(rows)))


@on_ranks_of("three_ranks")
def test_all_reduce_has_the_same_bits_on_every_backend_and_in_any_order(comm: Communicator) -> None:
    rows, padded = nasty(3, 5001, torch.float32), torch.zeros(5001)
    expected = bits(exact_sum(torch.stack(rows)))
    assert bits(exact_sum(torch.stack([*rows, padded, padded]))) == expected
    for turn in range(2):
        tensor = rows[(comm.rank + turn) % 3].clone()
        comm.all_reduce(tensor, reproducible=True)
        assert bits(tensor) == expected


@on_ranks_of("three_ranks")
def test_complex_numbers_are_summed_exactly_too(comm: Communicator) -> None:
    numbers, third = torch.tensor([1e8, 1, -1e8]), torch.tensor(1 / 3).item()
    sums = ((ReduceOp.SUM, 1 - 1j), (ReduceOp.AVG, third - third * 1j), (ReduceOp.premul_sum(2.0), 2 - 2j))
    for turn, (op, expected) in product(range(3), sums):
        mine = numbers[(comm.rank + turn) % 3]
        tensor = torch.complex(mine, -mine)
        comm.all_reduce(tensor, op, reproducible=True)
        assert tensor.item() == expected


@on_ranks(2, "inproc")
def test_extremes_have_the_same_bits_in_any_order(comm: Communicator) -> None:
    """Zeros of both signs are equal, and NaNs may have any sign: the result must not depend on their order."""
    for (op, last), dtype, turn in product(((ReduceOp.MIN, 3), (ReduceOp.MAX, 4)), DTYPES, range(2)):
        columns = torch.tensor([[0.0, math.nan, -0.0, 3], [-0.0, -math.nan, -0.0, 4]], dtype=dtype)
        tensor = columns[(comm.rank + turn) % 2].clone()
        comm.all_reduce(tensor, op, reproducible=True)
        assert bits(tensor) == bits(torch.tensor([0.0, math.nan, 0.0, last], dtype=dtype)), (op, dtype)


def correctly_rounded(numbers: list[float], dtype: torch.dtype) -> float:
    """The exact sum, by fractions, rounded to nearest in `dtype`, ties to even."""
    if any(map(math.isnan, numbers)) or {math.inf, -math.inf} <= set(numbers):
        return math.nan
    if infinite := [number for number in numbers if math.isinf(number)]:
        return infinite[0]
    exact = sum(map(Fraction, numbers), Fraction(0))
    if exact == 0:
        return math.copysign(0.0, -1 if all(math.copysign(1, number) < 0 for number in numbers) else 1)
    limits = torch.finfo(dtype)
    digits = 1 - int(math.log2(limits.eps))
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), int(math.log2(limits.smallest_normal)))
    unit = Fraction(2) ** (exponent - digits + 1)
    rounded = round(size / unit) * unit
    return math.copysign(math.inf if rounded > Fraction(limits.max) else float(rounded), 1 if exact > 0 else -1)


def values(dtype: torch.dtype) -> st.SearchStrategy[list[float]]:
    """Terms of a sum: any values of `dtype`, and often some that cancel, tie or vanish."""
    limits = torch.finfo(dtype)
    anything = st.floats(width=64).map(lambda number: torch.tensor(number, dtype=torch.float64).to(dtype).item())
    powers = st.integers(int(math.log2(limits.tiny)) - 10, math.frexp(limits.max)[1] - 1).map(
        lambda e: math.ldexp(1.0, e)
    )
    special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1 + limits.eps, limits.max, limits.tiny, limits.tiny * limits.eps])
    one = st.one_of(special, st.floats(-8, 8, width=16), powers, powers.map(lambda number: -number), anything)
    numbers = st.lists(one, min_size=1, max_size=12)
    return st.builds(lambda some, again: some + [-number for number in some[:again]], numbers, st.integers(0, 6))


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_the_result_is_the_exact_sum_rounded_once_in_any_order(dtype: torch.dtype, data: st.DataObject) -> None:
    """No sum is closer to the exact one; denormals, signed zeros, ties and overflow follow IEEE 754."""
    numbers = data.draw(values(dtype))
    rows = torch.tensor(numbers, dtype=torch.float64).to(dtype)[:, None]
    order = torch.tensor(data.draw(st.permutations(range(len(numbers)))))
    truth = torch.tensor([correctly_rounded([float(row) for row in rows], dtype)], dtype=torch.float64).to(dtype)
    if torch.isnan(truth):
        truth = torch.full_like(truth, math.nan)
    assert bits(exact_sum(rows)) == bits(truth)
    assert bits(exact_sum(rows[order])) == bits(truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_do_not_change_an_element(dtype: torch.dtype) -> None:
    """Whether its block is added plainly or exactly, an element has the same bits."""
    torch.manual_seed(1)
    plain = torch.randn(5, 40_000).to(dtype)
    plain[:, ::7] = -0.0
    careful = plain.clone()
    careful[0, 5::1000], careful[1, 5::1000], careful[2, 5::1000] = (
        torch.finfo(dtype).max,
        -1.0,
        torch.finfo(dtype).tiny,
    )
    careful[3, 6::1000] = math.inf
    alone, beside = exact_sum(plain), exact_sum(careful)
    touched = torch.zeros(40_000, dtype=torch.bool)
    touched[5::1000] = touched[6::1000] = True
    assert bits(alone[~touched]) == bits(beside[~touched])


@on_ranks(2, "inproc")
def test_dtypes_without_a_reproducible_sum_are_refused(comm: Communicator) -> None:
    with pytest.raises(Unsupported):
        sum_contributions(comm, [], torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="with this output it must be"):
        sum_contributions(comm, [torch.zeros(3)], torch.zeros(2))
    elsewhere = torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="output is on meta, which a communicator on cpu cannot use"):
        sum_contributions(comm, [elsewhere], elsewhere)
    with pytest.raises(ValueError, match="output is on meta"):
        scatter_contributions(comm, [torch.zeros(4, device="meta")], elsewhere)
    whole = torch.full((3,), comm.rank + 1)
    comm.all_reduce(whole, reproducible=True)
    assert whole.tolist() == [3, 3, 3]
