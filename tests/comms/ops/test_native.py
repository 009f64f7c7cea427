"""Compiled code: reductions give torch's bits, copies are right, and boards wake waiting ranks."""

from __future__ import annotations

import ctypes
import os
import time
import timeit
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comms import ReduceOp, _native, arithmetic
from holdfast.comms.ops import reduction_kind, signature
from holdfast.comms.tensors.packing import DTYPES, dlpack_device, packed, plain, span

OPS = {"sum": torch.add, "product": torch.multiply, "min": torch.minimum, "max": torch.maximum}
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
    return torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def expected(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.bool:
        logical = {"sum": torch.logical_or, "product": torch.logical_and, "min": torch.logical_and}
        return {**logical, "max": torch.logical_or, **BITS}[op](a, b)
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return torch.from_numpy(getattr(np, {**OPS, **BITS}[op].__name__)(a.numpy(), b.numpy()))
    return {**OPS, **BITS}[op](a, b)


@pytest.mark.parametrize("op", [*OPS, *BITS])
@pytest.mark.parametrize("dtype", arithmetic.REDUCIBLE, ids=str)
def test_a_reduction_gives_what_torch_gives(dtype: torch.dtype, op: str) -> None:
    kind = reduction_kind(dtype, ReduceOp(op))
    if kind < 0:
        assert dtype.is_floating_point or dtype.is_complex, "integers have every op"
        return

    @settings(max_examples=10)
    @given(count=st.integers(0, 300), seed=st.integers(0, 2**32), into=st.sampled_from(["a", "b", "another"]))
    def same(count: int, seed: int, into: str) -> None:
        a, b = random_tensor(dtype, count, seed), random_tensor(dtype, count, seed + 1)
        wanted = expected(op, a, b)
        out = {"a": a, "b": b, "another": torch.empty_like(a)}[into]
        _native.combine(kind, out.data_ptr(), a.data_ptr(), b.data_ptr(), count)
        torch.testing.assert_close(out, wanted, rtol=1e-6 if dtype.is_complex else 0, atol=0, equal_nan=True)

    same()


def test_a_plain_tensor_is_contiguous_host_memory_without_a_gradient_or_a_pending_negation() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    for tensor in (numbers, numbers[1:], numbers[0], torch.ones(()), torch.ones(0, 3), torch.ones(1, 1)):
        assert plain(tensor)
    for dtype in (*arithmetic.REDUCIBLE, *arithmetic.EIGHT_BIT_FLOATS):
        assert dtype.is_complex or plain(torch.ones(3).to(dtype))
    assert plain(torch.nn.Parameter(torch.ones(2)).data)
    others: list[Any] = [
        numbers.t(),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.complex64),
        torch.tensor(1 + 2j).conj().imag,
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})),
        [1.0],
        None,
    ]
    for other in others:
        assert not plain(other), other
    assert plain(torch.ones(2), *(dlpack_device(torch.device("cpu")) or ()))
    gpu = dlpack_device(torch.device("cuda", 1))
    assert gpu is not None and gpu[1] == 1 and not plain(torch.ones(2), *gpu)
    assert dlpack_device(torch.device("cuda")) is None, "any GPU: no tensor can be said to be there"
    assert dlpack_device(torch.device("meta")) is None


def test_a_packed_tensor_holds_the_same_numbers_and_is_plain() -> None:
    """A pending negation of torch is resolved; a tensor of one element can be viewed as bytes; a plain one stays."""
    put_off = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert packed(put_off).tolist() == [-2.0, 4.0]
    one_of_many = torch.arange(12.0).reshape(3, 4)[:1, :1]
    column = torch.ones(3, 1).as_strided((3, 1), (1, 7))
    for tensor in (put_off, put_off[:1], one_of_many, column):
        assert plain(packed(tensor))
        assert torch.equal(packed(tensor).view(torch.uint8).view(torch.float32), tensor)
    for shape in ((), (1,), (1, 1), (4,)):
        learned = torch.ones(shape, requires_grad=True)
        assert packed(learned).shape == shape and packed(learned).view(-1).view(torch.uint8).numel() == learned.nbytes
        assert packed(values := learned.detach()) is values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_span_is_the_memory_that_torch_reports(dtype: torch.dtype) -> None:
    memory = torch.empty(96, dtype=torch.uint8)
    for tensor in (memory.view(dtype), memory[dtype.itemsize :].view(dtype), memory[:0].view(dtype)):
        assert span(tensor) == (tensor.data_ptr(), tensor.nbytes)


@given(st.integers(0, 9000), st.integers(0, 4200), st.integers(0, 40))
def test_a_copy_is_right_at_any_offset(nbytes: int, ahead: int, start: int) -> None:
    """Copies may overlap their source, and include offsets at which some processors are slow."""
    memory = torch.randint(0, 256, (16_000,), dtype=torch.uint8)
    expected = memory.clone()
    expected[start + ahead : start + ahead + nbytes] = memory[start : start + nbytes]
    _native.copy(memory.data_ptr() + start + ahead, memory.data_ptr() + start, nbytes)
    assert torch.equal(memory, expected)


def test_copy_time_hardly_depends_on_the_offset_in_a_page() -> None:
    """Ratios of least times; by glibc alone it fails on Zen 4."""
    nbytes = 1 << 18
    source, target = (torch.ones(nbytes + (1 << 14), dtype=torch.uint8) for _ in range(2))
    page = -(target.data_ptr() - source.data_ptr()) % 4096

    def least(ahead: int) -> float:
        into, of = target.data_ptr() + page + ahead, source.data_ptr()
        return min(timeit.repeat(lambda: _native.copy(into, of, nbytes), number=3, repeat=30))

    assert least(8) < 5 * least(64)


SIZES = {"row": 8192, "table": 64, "places": 896, "slots": 1024, "slot": 64, "stage": 4096, "block": 64, "depth": 4}
ROW_WORDS = 1024


def test_a_board_refuses_memory_that_is_too_small_and_there_is_no_kernel_for_a_dtype_without_the_reduction() -> None:
    assert _native.kind("float8_e4m3fn", "sum") == -1 == _native.kind("complex64", "min")
    with pytest.raises(ValueError, match="no such reduction"):
        _native.combine(10_000, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="smaller"):
        _native.Board(bytearray(100), 0, 2, 0, **SIZES, spins=0, yields=0, pids=())
    with pytest.raises(ValueError, match="one process for each rank"):
        _native.Board(bytearray(16384), 0, 2, 0, **SIZES, spins=0, yields=0, pids=(1,))
    board = _native.Board(bytearray(16384), 0, 2, 0, **SIZES, spins=0, yields=0, pids=())
    with pytest.raises(ValueError, match="no such rank"):
        board.wake(3)
    board.release()
    with pytest.raises(ValueError, match="released"):
        board.raise_flag(1, 0)


def boards_of_two_ranks(pids: tuple[int, ...] = (), turns: int = 10) -> tuple[_native.Board, _native.Board, memoryview]:
    """The boards of ranks 0 and 1, for epoch 5, and the words. A wait has so many turns of each kind."""
    memory = bytearray(16384)
    first, second = (
        _native.Board(memory, rank, 2, 5, **SIZES, spins=turns, yields=turns, pids=pids) for rank in range(2)
    )
    return first, second, memoryview(memory).cast("Q")


def test_an_error_ends_a_sleep_and_so_does_the_end_of_the_board() -> None:
    first, _, words = boards_of_two_ranks()
    asleep = 8
    with pytest.raises(ZeroDivisionError):
        first.sleep_until(lambda: 1 / 0 > 0)
    assert words[asleep] == 0
    words.release()

    def release() -> bool:
        first.release()
        return False

    assert not first.sleep_until(release)


def test_a_sleeper_is_woken_by_a_rank_that_ends_the_epoch() -> None:
    state, epoch, aborted = 24, 26, 2
    first, second, words = boards_of_two_ranks()
    words[ROW_WORDS + epoch] = 5
    second.raise_flag(aborted, state)
    assert not first.is_over(), "a row of an earlier epoch does not count"
    words[ROW_WORDS + epoch] = 6
    assert first.is_over()
    assert not second.is_over(), "a rank's own row does not count"
    assert timeit.timeit(lambda: first.sleep_until(bool), number=20) < timeit.timeit(
        lambda: second.sleep_until(bool), number=20
    )


WAITS, OTHER_OP, GIVEN, TAKEN = 1, 3, 1, 3
ALL, BARRIER = 2, signature("barrier", None, 0, "", 0)
BROADCAST = signature("broadcast", torch.uint8, 1, "", 128)
"""Of 128 bytes, two blocks of these boards, by rank 1."""


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_bytes_read_from_a_rank_that_gave_up_are_not_used() -> None:
    """That rank may have overwritten its tensors before they were read."""
    never, wanted, state, epoch = (1 << 64) - 1, 5, 24, 26
    given, taken = bytearray(128), bytearray(128)
    first, second, words = boards_of_two_ranks((os.getpid(), os.getpid()))
    words[wanted] = (1 << 32) - 1  # rank 0 prefers to read in place
    assert second.run(BROADCAST, -1, (_address(given), 128), ()) == (WAITS, ALL, 5, 0), "until rank 0 has begun it"
    assert first.run(BROADCAST, -1, (), (_address(taken), 128)) == (WAITS, 1, 1, GIVEN), "until rank 1 goes on"
    assert second.run(BROADCAST, -1, (_address(given), 128), ()) == (WAITS, 0, 2, TAKEN), "until rank 0 has taken all"
    words[ROW_WORDS + epoch], words[ROW_WORDS + state] = 6, 2
    assert first.run(BROADCAST, -1, (), (_address(taken), 128)) == (WAITS, 1, never, GIVEN)


def test_a_resumed_op_has_to_be_the_one_that_has_begun() -> None:
    board, _, _ = boards_of_two_ranks()
    memory = bytearray(8)
    reduces = signature("all_reduce", torch.float32, 0, "sum", 2)
    kind, two = _native.kind("float32", "sum"), (_address(memory), 8)
    assert board.run(reduces, kind, two, two) == (WAITS, ALL, 5, 0) == board.run(reduces, kind, two, two)
    with pytest.raises(RuntimeError, match="another op was begun here"):
        board.run(BARRIER, -1, (), ())


@pytest.mark.parametrize("turns", [10, 0])
def test_a_rank_with_a_tiny_input_meets_one_with_a_larger_input_or_in_another_op(turns: int) -> None:
    """The larger one is not on the line where the first expects it. A rank may neither spin nor yield."""
    first, second, _ = boards_of_two_ranks(turns=turns)
    mine, theirs, both = bytearray(b"four"), bytearray(b"two" * 20), bytearray(64)
    gather, at = signature("all_gather", torch.uint8, 0, "", 0), _address(both)
    outputs = at, 4, at + 4, 60
    assert second.run(gather, -1, (_address(theirs), 60), outputs) == (WAITS, ALL, 5, 0)
    assert first.run(gather, -1, (_address(mine), 4), outputs) is None
    assert both == mine + theirs

    first, second, _ = boards_of_two_ranks(turns=turns)
    memory = bytearray(60)
    reduces, whole = signature("all_reduce", torch.float32, 0, "sum", 15), (_address(memory), 60)
    assert second.run(reduces, _native.kind("float32", "sum"), whole, whole) == (WAITS, ALL, 5, 0)
    assert first.run(BARRIER, -1, (), ())[:2] == (OTHER_OP, 1)


@pytest.mark.parametrize(
    ("op", "kind", "give", "take", "message"),
    [
        ("all_reduce", -1, 1, 1, "no such reduction"),
        ("all_reduce", 10_000, 1, 1, "no such reduction"),
        ("all_gather", 70, 1, 2, "no such reduction"),
        ("all_gather", -1, 1, 1, "other numbers of inputs and outputs"),
        ("broadcast", -1, 1, 1, "other numbers of inputs and outputs"),
        ("barrier", -1, 1, 0, "other numbers of inputs and outputs"),
        ("all_to_all", -1, 3, 2, "at most one for each rank"),
    ],
)
def test_an_op_with_other_pieces_than_its_kind_has_is_refused(
    op: str, kind: int, give: int, take: int, message: str
) -> None:
    board, _, _ = boards_of_two_ranks()
    memory = _address(bytearray(8))
    with pytest.raises(ValueError, match=message):
        board.run(signature(op, torch.float32, 0, "", 0), kind, (memory, 8) * give, (memory, 8) * take)
    assert board.number == 0


def test_a_wait_yields_for_a_while_at_most_and_not_once_it_has_stopped_spinning() -> None:
    """Its caller looks at its peers after that. What it computes is the same on a busy machine."""
    used = 0.0
    for phase in (5, 8):
        board = _native.Board(bytearray(16384), 0, 2, 0, **SIZES, spins=10, yields=10**12, pids=())
        board.stop_spinning(phase)
        for _ in range(10):
            began = time.thread_time()
            assert board.run(BARRIER, -1, (), ()) == (WAITS, ALL, 5, 0), "it waits for flag 5"
            used += (time.thread_time() - began) * (phase > 5)
        board.release()
    assert used < 0.01, "it yields for 20 ms else"


def test_words_hold_64_bits_and_stay_within_their_memory() -> None:
    memory = bytearray(24)
    words = _native.Words(memory)
    words[1] = (1 << 64) - 1
    assert (len(words), words[0], words[1], memory[8:16]) == (3, 0, (1 << 64) - 1, b"\xff" * 8)
    for index in (3, 1 << 40, -4):
        with pytest.raises(IndexError):
            words[index]
        with pytest.raises(IndexError):
            words[index] = 1
    for value in (1 << 64, -1):
        with pytest.raises(OverflowError):
            words[0] = value
    words.release()
    memory.extend(b"free")
    with pytest.raises(IndexError, match="released"):
        words[0]
    with pytest.raises(ValueError, match="a multiple of 8"):
        _native.Words(memoryview(bytearray(32))[1:])
