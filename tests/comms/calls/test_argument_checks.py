"""Arguments of ops: what is refused before a byte moves, and inputs that outputs overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Communicator, Recv, Send
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.collectives import ArgumentChecks
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import TAGS, ReduceOp
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities
from holdfast.comms.tensors.overlap import check_outputs
from support.comms.ranks import on_ranks, on_ranks_of

NAMES = frozenset({"float32", "float16", "int64", "bool"})
CPU = torch.device("cpu")


def checks_of(rank: int = 1, size: int = 3, **capabilities: Any) -> ArgumentChecks:
    able = Capabilities(**{"reduces": {"cpu": NAMES - {"bool"}}, "moves": {"cpu": NAMES}, **capabilities})
    info = BackendInfo("stub", API_VERSION, "for checks", able, lambda: Available(), None)
    return ArgumentChecks(rank, size, CPU, info)


checks = checks_of()


@pytest.mark.parametrize(
    ("dtype", "op", "carrier", "issued"),
    [
        ("float32", ReduceOp.SUM, "float32", "sum"),
        ("float32", ReduceOp.AVG, "float32", "avg"),
        ("float16", ReduceOp.SUM, "float16", "sum"),
        ("float16", ReduceOp.AVG, "float32", "premul_sum"),  # inputs are divided before they are added
        *((str(each).removeprefix("torch."), ReduceOp.MAX, "float32", "max") for each in EIGHT_BIT_FLOATS),
    ],
)
def test_a_tensor_is_reduced_itself_unless_its_sums_need_a_wider_dtype(
    dtype: str, op: ReduceOp, carrier: str, issued: str
) -> None:
    tensor = torch.ones(4).to(getattr(torch, dtype))
    for _ in range(2):  # and again, when the dtype is known
        assert checks.reducible(tensor, op) == getattr(torch, carrier)
    assert checks.carrier(tensor, op).dtype == getattr(torch, carrier)
    assert (checks.carrier(tensor, op) is tensor) == (dtype == carrier)
    assert checks.carrier_op(op, tensor.dtype).name == issued


def test_a_backend_without_a_wider_dtype_reduces_halves_as_they_are_and_no_floats_of_eight_bits() -> None:
    narrow, half = checks_of(reduces={"cpu": frozenset({"float16"})}), torch.ones(4, dtype=torch.float16)
    assert narrow.reducible(half, ReduceOp.AVG) == half.dtype and narrow.carrier(half, ReduceOp.AVG) is half
    with pytest.raises(Unsupported, match=r"reducing float8.*over 'stub'"):
        narrow.reducible(torch.ones(4).to(torch.float8_e5m2), ReduceOp.MAX)


def test_rows_of_another_size_and_none_at_all_fill_their_own_part() -> None:
    assert checks_of(0, 1).split_rows(torch.tensor(1.0), None, "input") == [1], "a number is one row"
    checks.evenly_divided(torch.ones(0, 2), "input")
    checks.own_part(torch.ones(0), [0, 0, 0], torch.ones(0), [0, 0, 0])
    checks.own_part(torch.ones(3, 2), [1, 1, 1], torch.ones(4), [1, 2, 1])  # as many elements, in rows of another size
    assert checks.message(torch.ones(1), 2, "dst", TAGS - 1) == (2, TAGS - 1)


class Odd:
    """No integer, tensor or reduction."""


SMALL = torch.ones(1)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: checks.movable(torch.ones(1, dtype=torch.int8)), Unsupported, "moving int8 over 'stub'"),
    (lambda: checks.reducible(torch.ones(1, dtype=torch.bool), ReduceOp.MAX), Unsupported, "reducing bool over"),
    (lambda: checks.reducible(SMALL, "sum"), TypeError, "op must be a holdfast.comms.ReduceOp, not 'sum'"),
    (lambda: checks.reducible(SMALL, ReduceOp.BAND), Unsupported, "bitwise reduction of float32"),
    (lambda: checks.operand(Odd(), "mine"), TypeError, "mine: expected a tensor, not Odd"),
    (lambda: checks.operands([SMALL, Odd()], "mine"), TypeError, r"mine\[1\]: expected a tensor"),
    (lambda: checks.operand(torch.ones(1, device="meta"), "mine"), ValueError, "mine is on meta"),
    (lambda: checks.rank(3, "root"), ValueError, "root=3 is out of range: ranks are 0 to 2"),
    (lambda: checks.rank(-1, "root"), ValueError, "root=-1 is out of range"),
    (lambda: checks.rank(1.0, "root"), TypeError, "root must be a whole number"),
    (lambda: checks.message(SMALL, 1, "dst", 0), ValueError, "dst=1: a rank cannot send to"),
    (lambda: checks.message(SMALL, 0, "dst", TAGS), ValueError, f"tag={TAGS} is out of range"),
    (lambda: checks.line(0, "dst", 2**30), ValueError, "tags are whole numbers from 0 to 1073741823"),
    (lambda: checks.message(SMALL, 0, "dst", -1), ValueError, "tag=-1 is out of range"),
    (lambda: checks.message(torch.ones(1, dtype=torch.int8), 0, "dst", 0), Unsupported, "moving int8"),
    (lambda: checks.one_for_each([SMALL] * 2, "parts", SMALL.dtype), ValueError, "parts has 2 tensors.* 3 ranks"),
    (lambda: checks.one_for_each([SMALL] * 3, "parts", torch.int64), ValueError, "parts holds torch.float32"),
    (lambda: checks.of_root([SMALL], "parts", 0, SMALL), ValueError, "parts belongs to rank 0 alone"),
    (lambda: checks.of_root(None, "parts", 1, SMALL), ValueError, "rank 1 must pass parts"),
    (lambda: checks.of_root([SMALL] * 2, "parts", 1, SMALL), ValueError, "parts has 2 tensors"),
    (lambda: checks.of_root([torch.ones(2)] * 3, "parts", 1, SMALL), ValueError, r"parts\[1\] has 2 elements.* 1"),
    (lambda: checks.same_dtype(SMALL, torch.ones(1, dtype=torch.int64)), ValueError, "the other torch.int64"),
    (lambda: checks.whole(torch.ones(7), torch.ones(2), "output", "input"), ValueError, "needs 6: size times input"),
    (lambda: checks.evenly_divided(torch.ones(4, 3), "input"), ValueError, "input has 4 rows, not a multiple of 3"),
    (lambda: checks.evenly_divided(torch.tensor(1.0), "input"), ValueError, "input has 1 rows"),
    (lambda: checks.split_rows(torch.ones(4), None, "input"), ValueError, "input has 4 rows, .* pass split sizes"),
    (lambda: checks.split_rows(torch.ones(3), [1, 2], "input"), ValueError, "input: split sizes .* over 3 ranks"),
    (lambda: checks.split_rows(torch.ones(3), [1, 1, 2], "input"), ValueError, "do not divide 3 rows"),
    (lambda: checks.split_rows(torch.ones(3), [4, 0, -1], "input"), ValueError, "do not divide 3 rows"),
    (lambda: checks.split_rows(torch.ones(3), [1, 1, True], "input"), TypeError, "a split size of input"),
    (
        lambda: checks.own_part(torch.ones(3), [1, 1, 1], torch.ones(4), [1, 2, 1]),
        ValueError,
        "rank 1 keeps 2 .* for 1",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words[:24] for _, _, words in REFUSED])
def test_a_wrong_argument_is_refused_by_name(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


Tensor = torch.Tensor
Parts = tuple[list[Tensor], list[Tensor]]
"""Outputs and inputs."""
Op = Callable[[Communicator, Sequence[Tensor], Sequence[Tensor]], object]

RANKS = 3
COUNTS = (3, 40_000)

OPS: dict[str, Op] = {
    "all_gather_single": lambda comm, outputs, inputs: comm.all_gather_single(outputs[0], inputs[0]),
    "all_gather": lambda comm, outputs, inputs: comm.all_gather(outputs, inputs[0]),
    "reduce_scatter_single": lambda comm, outputs, inputs: comm.reduce_scatter_single(outputs[0], inputs[0]),
    "reduce_scatter": lambda comm, outputs, inputs: comm.reduce_scatter(outputs[0], inputs),
    "all_to_all_single": lambda comm, outputs, inputs: comm.all_to_all_single(outputs[0], inputs[0]),
    "all_to_all": lambda comm, outputs, inputs: comm.all_to_all(outputs, inputs),
    "gather": lambda comm, outputs, inputs: comm.gather(inputs[0], outputs if comm.rank == 1 else None, 1),
    "scatter": lambda comm, outputs, inputs: comm.scatter(outputs[0], inputs if comm.rank == 1 else None, 1),
    "batch_send_recv": lambda comm, outputs, inputs: comm.batch_send_recv(
        [Send(inputs[0], (comm.rank + 1) % comm.size), Recv(outputs[0], (comm.rank - 1) % comm.size)]
    ),
}


def _shared(op: str, rank: int, count: int, shift: int) -> Parts:
    """An op's tensors in one buffer.

    `shift` 0: where NCCL has them in place, or the same for both; else the input lies so many elements further.
    """
    base = torch.arange((RANKS + 1) * count + shift, dtype=torch.float32) % 977 * (rank + 1)
    whole, part = base[: RANKS * count], base[rank * count + shift : (rank + 1) * count + shift]
    moved = base[shift : RANKS * count + shift]
    match op:
        case "all_gather_single":
            return [whole], [part]
        case "all_gather" | "gather":
            return list(whole.split(count)), [part]
        case "reduce_scatter_single":
            return [part], [whole]
        case "reduce_scatter" | "scatter":
            return [part], list(whole.split(count))
        case "all_to_all":
            return list(whole.split(count)), list(moved.split(count))
    return [whole], [moved]


@pytest.mark.parametrize("checks", ["0", "1"], indirect=True)
@on_ranks_of("three_ranks")
def test_an_input_that_shares_memory_with_the_output_is_read_as_it_was(comm: Communicator) -> None:
    """The result is that of separate memory for each tensor."""
    for op, count, shift in product(OPS, COUNTS, (0, 1, -1)):
        shift = shift * (count // 2)
        if shift < 0 and (comm.rank == 0 or op in ("all_to_all", "all_to_all_single", "batch_send_recv")):
            shift = -shift
        outputs, inputs = _shared(op, comm.rank, count, shift)
        apart = [[tensor.clone() for tensor in tensors] for tensors in (outputs, inputs)]
        OPS[op](comm, outputs, inputs)
        OPS[op](comm, *apart)
        assert all(map(torch.equal, outputs, apart[0])), (op, count, shift)


@on_ranks_of("three_ranks")
def test_an_output_whose_elements_share_memory_is_refused_before_anything_moves(comm: Communicator) -> None:
    size, ones, peer = comm.size, torch.ones(4), (comm.rank + 1) % comm.size
    base = torch.zeros(4 * size)
    overlapping = [base[2 * i : 2 * i + 4] for i in range(size)]
    calls: list[tuple[Any, ...]] = [
        ("all_gather", overlapping, ones),
        ("all_to_all", overlapping, [ones] * size),
        ("gather", ones, overlapping, comm.rank),
        ("batch_send_recv", [Recv(base[:4], peer), Recv(base[2:6], peer, 1)]),
    ]
    for bad in (torch.zeros(1).expand(4), torch.zeros(5).as_strided((2, 2), (1, 1))):
        whole = bad.reshape(-1)[:1].expand(4 * size)
        calls += [
            ("all_reduce", bad),
            ("reduce", bad, comm.rank),
            ("broadcast", bad, peer),
            ("all_gather_single", whole, ones),
            ("all_gather", [bad] * size, ones),
            ("reduce_scatter_single", bad, base),
            ("reduce_scatter", bad, [ones] * size),
            ("all_to_all_single", whole, base),
            ("all_to_all", [bad] * size, [ones] * size),
            ("gather", ones, [bad] * size, comm.rank),
            ("scatter", bad, None, peer),
            ("recv", bad, peer),
            ("batch_send_recv", [Recv(bad, peer)]),
        ]
    for op, *arguments in calls:
        with pytest.raises(ValueError, match="share memory"):
            getattr(comm, op)(*arguments)
    comm.all_reduce(ones)
    assert ones.tolist() == [size] * 4


@on_ranks_of("three_ranks")
def test_an_input_may_be_expanded(comm: Communicator) -> None:
    one = torch.full((1,), float(comm.rank + 1))
    gathered, received = torch.empty(4 * comm.size), torch.empty(4)
    comm.all_gather_single(gathered, one.expand(4))
    given = one.expand(4) if comm.rank == 0 else received
    comm.broadcast(given, 0)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.batch_send_recv([Send(one.expand(4), right), Recv(received, left)])
    assert gathered.tolist() == [rank + 1.0 for rank in range(comm.size) for _ in range(4)]
    assert received.tolist() == [left + 1.0] * 4 and bool(given[0] >= 1)


@on_ranks(1, "inproc")
def test_a_window_is_not_read_into_a_tensor_whose_elements_share_memory(comm: Communicator) -> None:
    with comm.window(torch.zeros(4)) as window, pytest.raises(ValueError, match="dst share memory"):
        window.get(torch.zeros(1).expand(4), 0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
    st.integers(0, 30),
)
def test_outputs_are_refused_only_if_a_byte_belongs_to_two_elements(
    first: list[tuple[int, int]], second: list[tuple[int, int]], offset: int
) -> None:
    base = torch.zeros(128)
    outputs = [
        base.as_strided([size for size, _ in dims], [stride for _, stride in dims], at)
        for dims, at in ((first, 0), (second, offset))
    ]
    places = [
        at + sum(index * stride for index, (_, stride) in zip(indices, dims, strict=True))
        for dims, at in ((first, 0), (second, offset))
        for indices in product(*(range(size) for size, _ in dims))
    ]
    if len(set(places)) == len(places):
        check_outputs(outputs, ["a", "b"])
    else:
        with pytest.raises(ValueError, match="share memory"):
            check_outputs(outputs, ["a", "b"])
