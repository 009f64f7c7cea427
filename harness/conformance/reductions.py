"""Checks of every reduction, by dtype and op, against results computed without communication.

Fixtures: `ranks`, a cluster over the backend that is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from holdfast.comms import Communicator, ReduceOp, Unsupported
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.quantised import reduce_scatter_quantised
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import moves, on_each_rank, reduces

COUNTS = (0, 1, 5, 1000, 40_000)
"""Elements: none, one, a few, a slot, and more than a slot."""
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*UNSIGNED, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def can_reduce(comm: Communicator, dtype: torch.dtype) -> bool:
    """Whether the backend says that it reduces `dtype`; if not, check only that it refuses to."""
    if reduces(comm.backend, dtype):
        return True
    with pytest.raises(Unsupported):
        comm.all_reduce(torch.zeros(1).to(dtype))
    return False


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's input: small whole numbers, so that sums and products are exact in every dtype."""
    numbers = (torch.arange(count) + rank) % 3 + 1
    return (numbers % 2).bool() if dtype == torch.bool else numbers.to(dtype)


EXPECTED: dict[ReduceOp, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
}


@on_each_rank
def test_all_reduce_of_every_dtype_and_op(comm: Communicator) -> None:
    for dtype in filter(lambda dtype: can_reduce(comm, dtype), (*INTEGERS, *FLOATS, *COMPLEX)):
        for op, expect in EXPECTED.items():
            if dtype.is_complex and op.name in ("min", "max"):
                continue
            for count in COUNTS:
                tensor = values(comm.rank, count, dtype)
                rows = torch.stack([values(r, count, torch.int64) for r in range(comm.size)])
                comm.all_reduce(tensor, op)
                torch.testing.assert_close(tensor, expect(rows).to(dtype))


@on_each_rank
def test_all_reduce_of_bools_and_bits(comm: Communicator) -> None:
    rows = [(torch.arange(8) >> r & 1).bool() for r in range(comm.size)]
    either, both = rows[comm.rank].clone(), rows[comm.rank].clone()
    comm.all_reduce(either, ReduceOp.BOR)
    comm.all_reduce(both, ReduceOp.BAND)
    assert torch.equal(either, torch.stack(rows).any(0))
    assert torch.equal(both, torch.stack(rows).all(0))
    bits = torch.arange(1000) * (comm.rank + 1)
    comm.all_reduce(bits, ReduceOp.BXOR)
    expected = torch.arange(1000)
    for r in range(1, comm.size):
        expected = expected ^ (torch.arange(1000) * (r + 1))
    assert torch.equal(bits, expected)


@on_each_rank
def test_reductions_of_eight_bit_floats(comm: Communicator) -> None:
    """Sums by the backend and as float32 are equal for small whole numbers."""
    for dtype in EIGHT_BIT_FLOATS:
        rows = [values(r, 1000, torch.float32) for r in range(comm.size)]
        total, largest = rows[comm.rank].to(dtype), rows[comm.rank].to(dtype)
        comm.all_reduce(total)
        comm.all_reduce(largest, ReduceOp.MAX)
        assert torch.equal(total.float(), torch.stack(rows).sum(0))
        assert torch.equal(largest.float(), torch.stack(rows).amax(0))
        part = torch.empty(10).to(dtype)
        comm.reduce_scatter_single(part, torch.ones(10 * comm.size).to(dtype))
        assert torch.equal(part.float(), torch.full((10,), float(comm.size)))
        with pytest.raises(Unsupported):
            comm.all_reduce(total, ReduceOp.BAND)


@on_each_rank
def test_average_and_scaled_sum(comm: Communicator) -> None:
    for count in (3, 40_000):
        mean = torch.full((count,), float(comm.rank))
        comm.all_reduce(mean, ReduceOp.AVG)
        assert torch.equal(mean, torch.full((count,), (comm.size - 1) / 2))
        scaled = torch.full((count,), float(comm.rank + 1))
        comm.all_reduce(scaled, ReduceOp.premul_sum(0.5))
        assert torch.equal(scaled, torch.full((count,), comm.size * (comm.size + 1) / 4))
        whole = torch.full((count,), -3 - comm.rank)
        comm.all_reduce(whole, ReduceOp.AVG)
        total = sum(-3 - r for r in range(comm.size))
        assert torch.equal(whole, torch.full((count,), int(total / comm.size)))
        for dtype in filter(lambda dtype: can_reduce(comm, dtype), (torch.uint8, torch.uint16, torch.uint32)):
            positive = torch.full((count,), comm.rank + 40, dtype=dtype)
            comm.all_reduce(positive, ReduceOp.AVG)
            assert torch.equal(positive, torch.full((count,), 40 + (comm.size - 1) // 2, dtype=dtype))


@on_each_rank
def test_averages_and_scaled_sums_do_not_overflow_on_their_way(comm: Communicator) -> None:
    """Every reduction adds narrow numbers in a wider dtype and rounds once."""
    largest: list[tuple[torch.dtype, float]] = [(torch.float16, 60000.0), (torch.bfloat16, 3e38)]
    largest += [(dtype, float(torch.iinfo(dtype).max)) for dtype in INTEGERS if dtype.itemsize < 4]
    for dtype, number in filter(lambda each: can_reduce(comm, each[0]), largest):
        for count in (3, 40_000):
            full = torch.full((count,), number).to(dtype)
            mean, part, own = full.clone(), torch.empty_like(full), torch.empty_like(full)
            comm.all_reduce(mean, ReduceOp.AVG)
            comm.reduce_scatter_single(part, full.repeat(comm.size), ReduceOp.AVG)
            comm.reduce_scatter(own, [full] * comm.size, ReduceOp.AVG)
            assert torch.equal(mean, full) and torch.equal(part, full) and torch.equal(own, full), dtype
            comm.reduce(mean, 0, ReduceOp.AVG)
            assert torch.equal(mean, full), dtype
    half = torch.full((3,), 60000.0 if comm.rank % 2 == 0 else -60000.0).half()
    comm.all_reduce(half, ReduceOp.premul_sum(2.0))
    assert torch.equal(half, torch.full((3,), 120000.0 * (comm.size % 2)).half())
    third = torch.full((3,), 1.0).half()
    comm.all_reduce(third, ReduceOp.premul_sum(1 / 3))
    assert torch.equal(third, torch.full((3,), comm.size / 3).half()), "rounded once"


def test_every_rank_keeps_the_same_zero_and_every_nan(ranks: LocalCluster) -> None:
    """All ranks get equal bits, also of zeros of both signs; a NaN of any rank gives NaN on all."""

    def body(comm: Communicator) -> list[bytes]:
        found = []
        for dtype in filter(lambda dtype: can_reduce(comm, dtype), FLOATS):
            for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
                for odd in range(comm.size):
                    zero = torch.full((3,), -0.0 if comm.rank == odd else 0.0, dtype=dtype)
                    several = torch.full((3,), -math.nan if comm.rank == odd else math.nan, dtype=dtype)
                    one = torch.full((3,), math.nan if comm.rank == odd else 1.0, dtype=dtype)
                    for tensor in (zero, several, one):
                        comm.all_reduce(tensor, op)
                        found.append(bytes(tensor.view(torch.uint8).numpy()))
                    assert bool((zero == 0).all() and torch.isnan(torch.cat([several, one])).all())
        return found

    outcomes = ranks.run(body)
    assert all(outcome == outcomes[0] for outcome in outcomes)


@on_each_rank
def test_payloads_of_many_segments(comm: Communicator) -> None:
    count = 3_000_001
    steps = torch.arange(count) % 1000
    tensor = (steps * (comm.rank + 1)).float()
    comm.all_reduce(tensor)
    total = comm.size * (comm.size + 1) // 2
    assert torch.equal(tensor, (steps * total).float())
    comm.all_reduce(tensor, ReduceOp.premul_sum(0.5))
    assert torch.equal(tensor, (steps * total).float() * 0.5 * comm.size)
    if can_reduce(comm, torch.bfloat16):
        halves = (steps % 7).bfloat16()
        comm.all_reduce(halves)
        assert torch.equal(halves, (steps % 7 * comm.size).bfloat16())


@on_each_rank
def test_overflow_is_infinity_without_a_warning(comm: Communicator) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (2, 40_000):
            tensor = torch.full((count,), 3e38)
            comm.all_reduce(tensor)
            assert bool(torch.isinf(tensor).all()) == (comm.size > 1)


@on_each_rank
def test_reduce_leaves_other_ranks_as_they_were(comm: Communicator) -> None:
    for count in COUNTS:
        for dst in range(comm.size):
            tensor = values(comm.rank, count, torch.float32)
            comm.reduce(tensor, dst)
            rows = torch.stack([values(r, count, torch.float32) for r in range(comm.size)])
            assert torch.equal(tensor, rows.sum(0) if comm.rank == dst else rows[comm.rank])


@on_each_rank
def test_reduce_scatter_single_and_in_uneven_lists(comm: Communicator) -> None:
    total = comm.size * (comm.size + 1) // 2
    for count in COUNTS:
        output = torch.empty(count)
        tensor = torch.arange(float(comm.size)).repeat_interleave(count) * (comm.rank + 1)
        comm.reduce_scatter_single(output, tensor)
        assert torch.equal(output, torch.full((count,), float(comm.rank * total)))
        rows = torch.empty(count, 2)
        comm.reduce_scatter_single(rows, tensor[:, None].expand(-1, 2))
        assert torch.equal(rows, output[:, None].expand(-1, 2))
        inputs = [torch.full((r * count,), float(comm.rank)) for r in range(comm.size)]
        uneven = torch.empty(comm.rank * count)
        comm.reduce_scatter(uneven, inputs, ReduceOp.MAX)
        assert torch.equal(uneven, torch.full_like(uneven, comm.size - 1.0))


@on_each_rank
def test_a_scaled_sum_takes_each_ranks_factor_from_a_tensor(comm: Communicator) -> None:
    factor = torch.tensor([float(comm.rank + 1)], dtype=torch.float64)
    op = ReduceOp.premul_sum(factor)
    total = float(sum(range(1, comm.size + 1)))
    for dtype in filter(lambda dtype: can_reduce(comm, dtype), (*FLOATS, torch.complex64)):
        for count in (0, 3, 40_000):
            tensor = torch.ones(count, dtype=dtype)
            for _ in range(2):  # the second time a plan is known
                comm.all_reduce(tensor.fill_(1), op)
                assert torch.equal(tensor, torch.full_like(tensor, total))
    parts = torch.ones(4 * comm.size).view(comm.size, 4) * torch.arange(1.0, comm.size + 1)[:, None]
    part = torch.empty(4)
    comm.reduce_scatter_single(part, parts.view(-1), op)
    assert torch.equal(part, torch.full((4,), total * (comm.rank + 1)))
    comm.reduce_scatter(part, list(parts), op)
    assert torch.equal(part, torch.full((4,), total * (comm.rank + 1)))
    factor.fill_(2.0)
    at_root = torch.ones(4)
    comm.reduce(at_root, 0, op)
    assert torch.equal(at_root, torch.full((4,), 2.0 * comm.size if comm.rank == 0 else 1.0))
    with pytest.raises(ValueError, match="one real element"):
        ReduceOp.premul_sum(torch.ones(2))
    with pytest.raises(Unsupported, match="premul_sum of int64"):
        comm.all_reduce(torch.ones(2, dtype=torch.int64), op)


@on_each_rank
def test_sparse_tensors_are_summed_by_their_entries(comm: Communicator) -> None:
    for dtype in filter(lambda dtype: can_reduce(comm, dtype), (torch.float32, torch.bfloat16, torch.int64)):
        for count in (0, 1, 500):  # entries of rank 1; the others have other numbers of them
            rows = [_entries(r, count * r, dtype) for r in range(comm.size)]
            dense = torch.stack([row.to_dense().double() for row in rows])
            expected = {ReduceOp.SUM: dense.sum(0), ReduceOp.AVG: dense.sum(0) / comm.size}
            for op, result in expected.items():
                tensor = rows[comm.rank].clone()
                work = comm.all_reduce(tensor, op, async_op=op is ReduceOp.AVG)
                work.wait()
                exact = result if dtype.is_floating_point else result.trunc()
                assert tensor.is_sparse and tensor.dtype == dtype
                torch.testing.assert_close(tensor.to_dense(), exact.to(dtype))
    with pytest.raises(Unsupported, match="max"):
        comm.all_reduce(torch.ones(2).to_sparse(), ReduceOp.MAX)
    with pytest.raises(Unsupported, match="reproducible"):
        comm.all_reduce(torch.ones(2).to_sparse(), reproducible=True)
    comm.barrier()


def _entries(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A sparse tensor of 100 rows of 3, in which some rows are stored several times."""
    places = (torch.arange(count) * 7 + rank) % 100
    return torch.sparse_coo_tensor(
        places[None], torch.ones(count, 3, dtype=dtype) * (rank + 1), (100, 3), check_invariants=True
    )


@on_each_rank
def test_a_quantised_reduce_scatter_keeps_its_bound(comm: Communicator) -> None:
    if not moves(comm.backend, torch.uint8):
        return
    for count in (0, 1, 130, 40_000):
        rows = [_numbers(r, count * comm.size) for r in range(comm.size)]
        others = (
            sum((row.abs().max() for r, row in enumerate(rows) if r != comm.rank), torch.tensor(0.0)) if count else 0
        )
        output = torch.empty(count)
        reduce_scatter_quantised(comm, output, rows[comm.rank], op=ReduceOp.AVG)
        exact = torch.stack(rows).mean(0)[comm.rank * count : (comm.rank + 1) * count]
        assert ((output - exact).abs() <= 0.065 * others / comm.size + 1e-6).all()


def _numbers(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))
