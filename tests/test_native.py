"""The compiled reductions agree with torch's own, bit by bit, for every dtype and op that they have."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import ReduceOp, _native
from holdfast.comms.algorithms import arithmetic

OPS = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
AWKWARD = [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf"), float("nan"), 6e-8, 65504.0, 3.3e38, 1e-45]


def random_tensor(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 100
        awkward = torch.tensor(AWKWARD, dtype=torch.float64)
        chosen = awkward[torch.randint(len(AWKWARD), (count,), generator=generator)]
        return torch.where(torch.rand(count, generator=generator) < 0.3, chosen, numbers).to(dtype)
    return (
        torch.randint(-(2**62), 2**62, (count,), generator=generator)
        .to(torch.int64)
        .view(torch.uint8)
        .repeat(dtype.itemsize)[: count * dtype.itemsize]
        .view(dtype)
    )


def expected(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.bool:
        logical = {"sum": torch.logical_or, "product": torch.logical_and, "min": torch.logical_and}
        return {**logical, "max": torch.logical_or, **BITS}[op](a, b)
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numpy = {"sum": "add", "product": "multiply", "min": "minimum", "max": "maximum"}
        names = {**numpy, "band": "bitwise_and", "bor": "bitwise_or", "bxor": "bitwise_xor"}
        import numpy as np

        return torch.from_numpy(getattr(np, names[op])(a.numpy(), b.numpy()))
    return {**OPS, **BITS}[op](a, b)


@pytest.mark.parametrize("op", [*OPS, *BITS])
@pytest.mark.parametrize("dtype", arithmetic.REDUCIBLE, ids=str)
def test_a_reduction_is_torchs_own(dtype: torch.dtype, op: str) -> None:
    kind = arithmetic.kind(dtype, ReduceOp(op))
    if kind < 0:
        assert dtype.is_floating_point or dtype.is_complex, "integers have every op"
        return

    @settings(max_examples=10, deadline=None)
    @given(count=st.integers(0, 300), seed=st.integers(0, 2**32), into=st.sampled_from(["a", "b", "another"]))
    def same(count: int, seed: int, into: str) -> None:
        a, b = random_tensor(dtype, count, seed), random_tensor(dtype, count, seed + 1)
        wanted = expected(op, a, b)
        out = {"a": a, "b": b, "another": torch.empty_like(a)}[into]
        _native.combine(kind, out.data_ptr(), a.data_ptr(), b.data_ptr(), count)
        torch.testing.assert_close(out, wanted, rtol=1e-6 if dtype.is_complex else 0, atol=0, equal_nan=True)

    same()


def test_what_cannot_be_reduced_has_no_number() -> None:
    assert _native.kind("float8_e4m3fn", "sum") == -1
    assert _native.kind("complex64", "min") == -1
    with pytest.raises(ValueError, match="no such reduction"):
        _native.combine(10_000, 0, 0, 0, 0)


def test_a_board_refuses_memory_that_is_too_small() -> None:
    sizes = {"row": 4096, "table": 64, "slots": 1024, "slot": 64, "stage": 2048, "block": 64, "depth": 4}
    with pytest.raises(ValueError, match="smaller"):
        _native.Board(bytearray(100), 0, 2, **sizes, spins=0, yields=0)
    board = _native.Board(bytearray(8192), 0, 2, **sizes, spins=0, yields=0)
    with pytest.raises(ValueError, match="no such rank"):
        board.wait(2, 1, 0)
    board.release()
    with pytest.raises(ValueError, match="released"):
        board.raise_flag(1, 0)


def test_who_rests_does_not_give_way() -> None:
    """A wait that would give way for ever ends at once, so that its caller sleeps; one for later goes on."""
    sizes = {"row": 4096, "table": 64, "slots": 1024, "slot": 64, "stage": 2048, "block": 64, "depth": 4}
    board = _native.Board(bytearray(8192), 0, 2, **sizes, spins=10, yields=10**12)
    board.rest(8)
    assert not board.wait(1, 7, 0)
    waits = threading.Thread(target=board.wait, args=(1, 8, 0))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    board.rest(9)
    waits.join(10.0)
    assert not waits.is_alive()
    board.release()
