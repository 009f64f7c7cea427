"""Sums that have the same bits however the values are spread over ranks, and whatever moves them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, Unsupported
from holdfast.comms.reproducible import exact_sum, sum_contributions
from holdfast.harness import LocalCluster

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def nasty(contributions: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Values of very different sizes that nearly cancel: a plain sum's bits depend on the order."""
    generator = torch.Generator().manual_seed(contributions * count)
    exponents = torch.randint(-8, 9, (contributions, count), generator=generator).double()
    rows = torch.randn(contributions, count, generator=generator, dtype=torch.float64) * 2.0**exponents
    rows[contributions // 2] = -rows[:2].sum(0)
    return list(rows.to(dtype))


@pytest.mark.parametrize("backend_name", ["inproc", "shm", "gloo", "ucx"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_same_bits_whoever_holds_which(backend_name: str, size: int) -> None:
    def body(comm: Communicator) -> list[bytes]:
        found = []
        for dtype in DTYPES:
            for count in (0, 1, 1001):
                rows = nasty(8, count, dtype)
                for spread in (lambda i: i % comm.size, lambda i: 0, lambda i: (i * i + 1) % comm.size):
                    mine = [row for i, row in enumerate(rows) if spread(i) == comm.rank]
                    output = torch.empty(count, dtype=dtype)
                    sum_contributions(comm, mine, output)
                    found.append(bits(output) == bits(exact_sum(torch.stack(rows))))
        return found

    with LocalCluster(size, backend_name) as cluster:
        assert all(all(found) for found in cluster.run(body))


def test_all_reduce_has_the_same_bits_on_every_backend_and_in_any_order(backend: str) -> None:
    def body(comm: Communicator) -> bytes:
        rows = nasty(3, 5001, torch.float32)
        tensor = rows[comm.rank].clone()
        comm.all_reduce(tensor, reproducible=True)
        turned = rows[(comm.rank + 1) % 3].clone()
        comm.all_reduce(turned, reproducible=True)
        assert bits(tensor) == bits(turned)
        padded = torch.zeros(5001)
        assert bits(exact_sum(torch.stack([*rows, padded, padded]))) == bits(tensor)
        return bits(tensor)

    expected = bits(exact_sum(torch.stack(nasty(3, 5001, torch.float32))))
    with LocalCluster(3, backend) as cluster:
        assert cluster.run(body) == [expected] * 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_order_gives_the_same_bits_and_is_no_worse_than_a_plain_sum(numbers: list[float], random: object) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for dtype in (torch.float32, torch.float64):
        rows = torch.tensor(numbers, dtype=dtype)[:, None]
        result = exact_sum(rows)
        assert bits(result) == bits(exact_sum(torch.tensor(shuffled, dtype=dtype)[:, None]))
        truth = math.fsum(numbers)
        if abs(truth) > torch.finfo(dtype).max / 4:
            continue
        rounding = torch.finfo(dtype).eps * max(map(abs, numbers)) * len(numbers)
        assert abs(float(result[0]) - truth) <= rounding


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_doubles_of_any_size(numbers: list[float]) -> None:
    rows = torch.tensor(numbers, dtype=torch.float64)[:, None]
    assert bits(exact_sum(rows)) == bits(exact_sum(rows.flip(0)))
    try:
        truth = math.fsum(numbers)
    except OverflowError:
        return
    result = float(exact_sum(rows)[0])
    if math.isfinite(result):
        assert abs(result - truth) <= 2.0**-51 * max(map(abs, numbers)) * len(numbers) + 5e-324


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_come_out_as_in_a_plain_sum(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    columns = [[inf, 1, 2], [-inf, 1, inf], [nan, 1, 2], [-inf, -inf, 3], [1, 2, 3], [0.0, 0.0, 0.0]]
    rows = torch.tensor(columns, dtype=dtype).t().contiguous()
    result = exact_sum(rows)
    torch.testing.assert_close(result, rows.sum(0), equal_nan=True)
    assert bits(result) == bits(exact_sum(rows.flip(0)))


def test_what_has_no_reproducible_sum_is_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(Unsupported):
            sum_contributions(comm, [], torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(ValueError, match="must be alike"):
            sum_contributions(comm, [torch.zeros(3)], torch.zeros(2))
        whole = torch.full((3,), comm.rank + 1)
        comm.all_reduce(whole, reproducible=True)
        assert whole.tolist() == [3, 3, 3]

    with LocalCluster(2, "inproc") as cluster:
        cluster.run(body)
