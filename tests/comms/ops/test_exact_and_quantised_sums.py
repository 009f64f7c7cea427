"""Reproducible sums have the same bits on any ranks and backend; quantised ones keep their bound.

Errors of a quantised all_reduce do not add up with feedback, and one that fails changes nothing.
"""

from __future__ import annotations

import math
import os
import signal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, PeerFailed, ReduceOp, Revoked, Unsupported
from holdfast.comms.codecs.float8_blocks import BLOCK
from holdfast.comms.quantised import ErrorFeedback, all_reduce_quantised, reduce_scatter_quantised
from holdfast.comms.reproducible import exact_sum, scatter_contributions, sum_contributions
from holdfast.harness import LocalCluster
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


ranks = shared_ranks(2, "inproc-2", "inproc-3", "inproc-4")
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
def test_all_reduce_has_the_same_bits_on_every_backend_in_any_order_and_for_complex_numbers(comm: Communicator) -> None:
    rows, padded = nasty(3, 5001, torch.float32), torch.zeros(5001)
    expected = bits(exact_sum(torch.stack(rows)))
    assert bits(exact_sum(torch.stack([*rows, padded, padded]))) == expected
    for turn in range(2):
        tensor = rows[(comm.rank + turn) % 3].clone()
        comm.all_reduce(tensor, reproducible=True)
        assert bits(tensor) == expected
    numbers, third = torch.tensor([1e8, 1, -1e8]), torch.tensor(1 / 3).item()
    sums = ((ReduceOp.SUM, 1 - 1j), (ReduceOp.AVG, third - third * 1j), (ReduceOp.premul_sum(2.0), 2 - 2j))
    for turn, (op, number) in product(range(3), sums):
        mine = numbers[(comm.rank + turn) % 3]
        tensor = torch.complex(mine, -mine)
        comm.all_reduce(tensor, op, reproducible=True)
        assert tensor.item() == number


@on_ranks_of("ranks")
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
    limits = torch.finfo(dtype)
    careful[:3, 5::1000] = torch.tensor([limits.max, -1.0, limits.tiny], dtype=torch.float64).to(dtype)[:, None]
    careful[3, 6::1000] = math.inf
    alone, beside = exact_sum(plain), exact_sum(careful)
    touched = torch.zeros(40_000, dtype=torch.bool)
    touched[5::1000] = touched[6::1000] = True
    assert bits(alone[~touched]) == bits(beside[~touched])


@on_ranks_of("ranks")
def test_outputs_and_contributions_that_an_exact_sum_cannot_use_are_refused(comm: Communicator) -> None:
    ones, freed = torch.ones(4), torch.ones(4)
    elsewhere, shares = torch.ones(4, device="meta"), torch.zeros(1).expand(4)
    freed.untyped_storage().resize_(0)
    parts = [torch.ones(4 * comm.size)]
    refused: list[tuple[Any, list[Any], torch.Tensor, type[Exception], str]] = [
        (sum_contributions, [], torch.zeros(2, dtype=torch.complex64), Unsupported, "complex64"),
        (sum_contributions, [torch.zeros(3)], torch.zeros(2), ValueError, "with this output it must be"),
        (sum_contributions, [elsewhere], elsewhere, ValueError, "output is on meta, which a communicator on cpu can"),
        (scatter_contributions, [elsewhere], torch.ones(2, device="meta"), ValueError, "output is on meta"),
        (sum_contributions, [ones], shares, ValueError, "several elements of output share memory"),
        (sum_contributions, [ones], torch.zeros(5).as_strided((2, 2), (1, 1)), ValueError, "share memory"),
        (scatter_contributions, parts, shares, ValueError, "several elements of output share memory"),
        (sum_contributions, [ones, freed], torch.empty(4), Unsupported, r"contributions\[1\]"),
        (scatter_contributions, [freed], torch.empty(2), Unsupported, r"contributions\[0\]"),
        (sum_contributions, [[1.0] * 4], torch.empty(4), TypeError, r"contributions\[0\]: expected a tensor, not list"),
    ]
    for call, contributions, output, error, said in refused:
        with pytest.raises(error, match=said):
            call(comm, contributions, output)
    output, whole = torch.empty(4), torch.full((3,), comm.rank + 1)
    sum_contributions(comm, [ones], output)
    comm.all_reduce(whole, reproducible=True)
    assert output.tolist() == [comm.size] * 4 and whole.tolist() == [comm.size * (comm.size + 1) // 2] * 3


@on_ranks(2, "inproc")
def test_contributions_that_share_memory_with_the_output_are_read_as_they_were(comm: Communicator) -> None:
    """A sum is written segment by segment, each as soon as it is known: these have more than one segment."""
    count, rank = 600_000, comm.rank
    for shift in (-1, 0, 1):
        base = torch.arange(2.0 * count + 2, dtype=torch.float64)
        given, output = base[1 : count + 1], base[1 + shift : count + 1 + shift]
        expected = 4 * given
        sum_contributions(comm, [given, given], output)
        assert torch.equal(output, expected)
        base = torch.arange(2.0 * count + 2, dtype=torch.float64)
        given, at = base[1:-1], 1 + shift + rank * count
        expected = 2 * given[rank * count :][:count]
        scatter_contributions(comm, [given], base[at : at + count])
        assert torch.equal(base[at : at + count], expected)


BOUND, RESIDUAL_BOUND = 0.13, 0.15


def numbers(rank: int, step: int, count: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes, with blocks of zeros and with denormals of float8 in them."""
    generator = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
    exponents = torch.randint(-6, 7, (count,), generator=generator).float()
    found = torch.randn(count, generator=generator) * 2.0**exponents
    found[: count // 3] *= 1e-6
    found[count // 2 : count // 2 + 150] = 0.0
    return found.to(dtype)


def largest(contributions: list[torch.Tensor]) -> torch.Tensor:
    """For each element, the largest magnitudes in its block of the ranks' contributions, added up."""
    total = torch.zeros(contributions[0].numel(), dtype=torch.float64)
    for each in contributions:
        for start in range(0, each.numel(), BLOCK):
            total[start : start + BLOCK] += each[start : start + BLOCK].abs().max().double()
    return total


@settings(max_examples=12)
@example(count=3, seed=248, dtype=torch.float16, average=True, steps=1)
@example(count=3, seed=1, dtype=torch.float16, average=True, steps=1)
@given(
    count=st.integers(0, 1500),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    average=st.booleans(),
    steps=st.integers(1, 6),
)
def test_an_error_keeps_its_bound_and_many_do_not_add_up(
    ranks: LocalCluster, count: int, seed: int, dtype: torch.dtype, average: bool, steps: int
) -> None:
    def body(comm: Communicator) -> tuple[list[torch.Tensor], torch.Tensor]:
        feedback, results = ErrorFeedback(), []
        for step in range(steps):
            tensor = numbers(comm.rank, step, count, seed, dtype)
            all_reduce_quantised(comm, tensor, feedback, ReduceOp.AVG if average else ReduceOp.SUM)
            results.append(tensor)
        assert feedback.residual is not None
        return results, feedback.residual

    found = ranks.run(body)
    size = len(found)
    for results, _ in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results, found[0][0], strict=True))
    given_numbers = [[numbers(rank, step, count, seed, dtype) for rank in range(size)] for step in range(steps)]
    scale = size if average else 1
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    step_of_subnormals = scale * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    first, wanted = found[0][0][0].double(), sum(each.double() for each in given_numbers[0])
    around = largest(given_numbers[0])
    assert ((first * scale - wanted).abs() <= BOUND * around + rounding * 2 * around + step_of_subnormals).all()

    total = sum(results.double() * scale for results in found[0][0])
    everything = sum(each.double() for step in given_numbers for each in step)
    residuals = sum(residual.double() for _, residual in found)
    most = torch.stack([largest(step) for step in given_numbers]).amax(0)
    assert (residuals.abs() <= RESIDUAL_BOUND * most + 1e-30).all()
    assert ((total + residuals - everything).abs() <= steps * (rounding * 2 * most + step_of_subnormals) + 1e-30).all()


@settings(max_examples=12)
@given(
    width=st.integers(0, 500),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    steps=st.integers(1, 4),
)
def test_what_a_reduce_scatter_loses_is_in_the_feedback(
    ranks: LocalCluster, width: int, seed: int, dtype: torch.dtype, steps: int
) -> None:
    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        feedback, total = ErrorFeedback(), torch.zeros(width, dtype=torch.float64)
        for step in range(steps):
            given_numbers = numbers(comm.rank, step, width * comm.size, seed, dtype)
            output = given_numbers[comm.rank * width : (comm.rank + 1) * width]  # in place, as reduce_scatter_single
            reduce_scatter_quantised(comm, output, given_numbers, feedback)
            total += output.double()
        assert feedback.residual is not None
        with pytest.raises(ValueError, match="keep one for each tensor"):
            reduce_scatter_quantised(comm, torch.empty(width + 1), torch.empty((width + 1) * comm.size), feedback)
        return total, feedback.residual.double()

    found = ranks.run(body)
    size = len(found)
    given_numbers = [[numbers(rank, step, width * size, seed, dtype) for rank in range(size)] for step in range(steps)]
    everything = torch.stack([each.double() for step in given_numbers for each in step]).sum(0)
    lost = torch.stack([residual for _, residual in found]).sum(0)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    most = torch.stack([each.double().abs() for step in given_numbers for each in step]).sum(0)
    results = torch.cat([total for total, _ in found])
    assert ((results + lost - everything).abs() <= steps * rounding * (most + lost.abs()) + 1e-30).all()


def test_all_backends_give_the_same_bits(three_ranks: LocalCluster) -> None:
    def four_ops(comm: Communicator) -> bytes:
        feedback, found = ErrorFeedback(), b""
        for step, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16, torch.float16)):
            strided = numbers(comm.rank, step, 2 * 40_000, 7, dtype)[::2]
            all_reduce_quantised(comm, strided, feedback)
            found += bits(strided)
        assert feedback.residual is not None and feedback.residual.any()
        tensor = torch.full((5,), comm.rank + 1.0)
        tensor[2] = torch.inf
        all_reduce_quantised(comm, tensor, spoilt := ErrorFeedback())
        assert spoilt.residual is not None and spoilt.residual.isfinite().all()
        assert tensor.isnan().tolist() == [False, False, True, False, False]
        return found

    with LocalCluster(3, "inproc") as threads:
        assert three_ranks.run(four_ops) == threads.run(four_ops)


@pytest.mark.parametrize("backend_name", ["shm", "gloo"])
def test_an_op_that_fails_leaves_tensor_and_feedback_as_they_were(backend_name: str) -> None:
    """Rank 2 dies in the second op."""

    def body(comm: Communicator) -> str:
        feedback = ErrorFeedback()
        all_reduce_quantised(comm, numbers(comm.rank, 0, 70_000, 1, torch.float32), feedback)
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        before, tensor = feedback.residual, numbers(comm.rank, 1, 70_000, 1, torch.float32)
        assert before is not None
        bits = before.clone()
        with pytest.raises((PeerFailed, Revoked)) as failure:
            all_reduce_quantised(comm, tensor, feedback)
        assert feedback.residual is before
        assert torch.equal(before, bits)
        assert torch.equal(tensor, numbers(comm.rank, 1, 70_000, 1, torch.float32))
        return failure.type.__name__

    with LocalCluster(3, backend_name) as cluster:
        ends = cluster.outcomes(body)[:2]
        assert [end.error for end in ends] == [None, None] and "PeerFailed" in [end.value for end in ends]


@on_ranks_of("ranks")
def test_a_discarded_result_is_undone_and_what_cannot_be_quantised_is_refused(comm: Communicator) -> None:
    feedback, results = ErrorFeedback(), list[torch.Tensor]()
    all_reduce_quantised(comm, numbers(comm.rank, 0, 500, 2, torch.float32), feedback)
    for _ in range(2):
        tensor = numbers(comm.rank, 1, 500, 2, torch.float32)
        all_reduce_quantised(comm, tensor, feedback)
        results.append(tensor)
        feedback.undo()
    assert torch.equal(*results)
    with pytest.raises(Unsupported, match="float64"):
        all_reduce_quantised(comm, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(Unsupported, match="only sums and averages"):
        all_reduce_quantised(comm, torch.zeros(3), op=ReduceOp.MAX)
    with pytest.raises(ValueError, match="keep one for each tensor"):
        all_reduce_quantised(comm, torch.ones(4), feedback)
    comm.barrier()
