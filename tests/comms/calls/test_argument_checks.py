"""Arguments of ops: integers and timeouts of any kind, inputs that outputs overlap, objects, and what is refused.

An op that is refused before any byte moves leaves the communicator usable, as the conformance kit checks too. Objects
arrive as they were sent, or are refused before anything is sent, with their path. torch's global settings are ignored:
default device and dtype, determinism, inference mode.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import comms
from holdfast.comms import Communicator, Recv, ReduceOp, Send, collectives
from holdfast.comms.arithmetic import EIGHT_BIT_FLOATS
from holdfast.comms.codecs.objects import decode_object, encode_object
from holdfast.comms.collectives import ArgumentChecks
from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.ops import TAGS
from holdfast.comms.plugins.spec import API_VERSION, Available, BackendInfo, Capabilities
from holdfast.comms.quantities import integer, integer_in, seconds, seconds_or, time_left
from holdfast.comms.tensors.overlap import check_outputs
from holdfast.comms.transport.base import Transport
from holdfast.comms.work import DONE
from holdfast.ft import Session, Timeouts
from holdfast.harness import LocalCluster
from holdfast.store import WeightStore
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import MPI, on_ranks_of, second_tier
from support.samples.tally import assert_exact, cluster, start_with_spares, tally_up

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


SMALL = torch.ones(1)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: checks.movable(torch.ones(1, dtype=torch.int8)), Unsupported, "moving int8 over 'stub'"),
    (lambda: checks.reducible(torch.ones(1, dtype=torch.bool), ReduceOp.MAX), Unsupported, "reducing bool over"),
    (lambda: checks.reducible(SMALL, "sum"), TypeError, "op must be a holdfast.comms.ReduceOp, not 'sum'"),
    (lambda: checks.reducible(SMALL, ReduceOp.BAND), Unsupported, "bitwise reduction of float32"),
    (lambda: checks.operand(object(), "mine"), TypeError, "mine: expected a tensor, not object"),
    (lambda: checks.operands([SMALL, object()], "mine"), TypeError, r"mine\[1\]: expected a tensor"),
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
    (lambda: checks.own_part(torch.ones(3), [1] * 3, torch.ones(4), [1, 2, 1]), ValueError, "rank 1 keeps 2 .* for 1"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words[:24] for _, _, words in REFUSED])
def test_a_wrong_argument_is_refused_by_name(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


Tensor = torch.Tensor

RANKS = 3
COUNTS = (3, 40_000)

OPS: dict[str, Callable[[Communicator, Sequence[Tensor], Sequence[Tensor]], object]] = {
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


def _shared(op: str, rank: int, count: int, shift: int) -> tuple[list[Tensor], list[Tensor]]:
    """An op's outputs and inputs in one buffer.

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


fast_and_checked = pytest.mark.parametrize("checks", ["0", "1"], indirect=True)


@fast_and_checked
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
    given, left = torch.full((1,), comm.rank + 1.0).expand(4), (comm.rank - 1) % comm.size
    gathered, received = torch.empty(4 * comm.size), torch.empty(4)
    comm.all_gather_single(gathered, given)
    comm.broadcast(given if comm.rank == 0 else received, 0)
    comm.batch_send_recv([Send(given, (comm.rank + 1) % comm.size), Recv(received, left)])
    assert gathered.tolist() == [rank + 1.0 for rank in range(comm.size) for _ in range(4)]
    assert received.tolist() == [left + 1.0] * 4
    if comm.rank == 0:
        comm.send(given, 1)
    elif comm.rank == 1:
        comm.recv(received, 0)
        assert received.tolist() == [1.0] * 4


dims = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3)


@given(dims, dims, st.integers(0, 30))
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


# -- after a refusal


shared_code = pytest.mark.parametrize("two_ranks", ["inproc", "shm", "gloo", *second_tier("ucx", "mpi")], indirect=True)
on_processes = pytest.mark.parametrize("two_ranks", ["shm", "gloo", "ucx", MPI], indirect=True)


def _works(comm: Communicator) -> None:
    total = torch.ones(4)
    comm.all_reduce(total)
    comm.all_reduce(total, async_op=True).wait()
    assert total.tolist() == [comm.size**2] * 4 and comm.over is None


@on_processes
@on_ranks_of("two_ranks")
def test_a_communicator_works_after_a_transport_refused_an_op(comm: Communicator) -> None:
    def refuse(*args: Any) -> None:
        raise Unsupported("avg of uint64 on this device", "sum, and divide on the host")

    before = comm.progress[0]
    for refused in (
        lambda: comm.all_reduce(torch.ones(4, dtype=torch.int16), ReduceOp.AVG),
        lambda: comm.all_reduce(torch.ones(4, 2)[:, 0], async_op=True).wait(),
    ):
        comm.barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(comm.transport), "all_reduce", refuse)
            patch.setattr(type(comm.transport), "function", Transport.function)
            with pytest.raises(Unsupported):
                refused()
            comm.barrier()
        _works(comm)
    assert comm.progress[0] - before == 9, "2 x 4 ops, and the asynchronous one, which keeps its number"


@contextmanager
def _without_memory_for_a_copy() -> Iterator[None]:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError("for a copy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "packed", fail)
        yield


@fast_and_checked
@on_processes
@on_ranks_of("two_ranks")
def test_an_op_that_could_not_be_prepared_can_be_called_again(comm: Communicator) -> None:
    """One rank has no memory for a copy; it calls the op again, which then completes."""
    view = torch.ones(4, 2)[:, 0]
    if comm.rank == 0:
        with _without_memory_for_a_copy():
            for call in (lambda: comm.all_reduce(view), lambda: comm.all_reduce(view, timeout=5.0)):
                with pytest.raises(MemoryError):
                    call()
    comm.all_reduce(view)
    assert view.tolist() == [2.0] * 4 and comm.progress[0] == 1
    _works(comm)


@pytest.mark.parametrize("two_ranks", ["shm"], indirect=True)
@on_ranks_of("two_ranks")
def test_an_asynchronous_op_that_could_not_be_prepared_ends_the_communicator(comm: Communicator) -> None:
    """Ops are queued behind one that rank 0 cannot prepare: none may pair with that op of another rank."""
    view = torch.ones(4, 2)[:, 0]
    with _without_memory_for_a_copy() if comm.rank == 0 else nullcontext():
        first = comm.all_reduce(view, async_op=True)
        with pytest.raises(HoldfastError):
            comm.all_reduce(torch.full((4,), 100.0), async_op=True).wait(20.0)
        with pytest.raises((MemoryError, HoldfastError)):
            first.wait(20.0)
    assert comm.over is not None


@shared_code
@on_ranks_of("two_ranks")
def test_asynchronous_ops_run_with_the_modes_of_their_caller(comm: Communicator) -> None:
    """Their tensors may be such that only these modes allow to write."""
    kind, seen = type(comm.transport), list[tuple[bool, bool]]()

    def barrier(self: Any, deadline: float) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        original(self, deadline)

    original = kind.barrier
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for tensor in (
                torch.ones(4, 2)[:, 0],
                torch.ones(4),
                torch.ones(4, requires_grad=not torch.is_inference_mode_enabled()),
                torch.ones(4, dtype=torch.float16),
                torch.ones(4, dtype=torch.complex64).conj(),
            ):
                comm.all_reduce(tensor, async_op=True).wait()
                comm.broadcast(tensor, 0, async_op=True).wait()
                outputs = [torch.empty(4, 2, dtype=tensor.dtype)[:, 0] for _ in range(2)]
                comm.all_gather(outputs, tensor, True).wait()
                assert tensor.tolist() == [2.0] * 4
            if comm.backend != "inproc":  # its ranks share the class
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(kind, "barrier", barrier)
                    comm.barrier(async_op=True).wait()
                assert seen[-1] == (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    outside = torch.inference_mode()(lambda: torch.ones(4, 2)[:, 0])()
    comm.all_reduce(outside, async_op=True).wait()
    comm.all_reduce(outside)
    assert outside.tolist() == [4.0] * 4


@fast_and_checked
@shared_code
@on_ranks_of("two_ranks")
def test_an_object_that_cannot_be_sent_takes_its_turn(comm: Communicator) -> None:
    """On one rank an object is refused; every rank gets the error, and the next objects are paired rightly."""
    for number, unsendable in enumerate(({1, 2}, "\ud800", torch.ones(2))):
        odd = number % comm.size
        obj = unsendable if comm.rank == odd else "fine"
        words = "." if comm.rank == odd else f"rank {odd} could not send its object"
        for call in (comm.all_gather_object, lambda obj, odd=odd: comm.broadcast_object(obj, odd)):
            with pytest.raises(TypeError, match=words):
                call(obj)
            assert comm.all_gather_object([number, comm.rank]) == [[number, rank] for rank in range(comm.size)]
            assert comm.broadcast_object(number if comm.rank == odd else None, odd) == number


# -- integers and timeouts of every kind


INTEGERS: list[Callable[[int], Any]] = [int, np.int64, np.uint8, np.int16, lambda value: torch.tensor(value)]
NO_INTEGERS: list[Any] = [True, np.True_, 1.0, np.float32(1), "1", None, [1], torch.tensor(1.5), torch.ones(2)]
TIMEOUTS: list[Any] = [5, 5.0, np.float32(5), np.int64(5), datetime.timedelta(seconds=5)]
NO_TIMEOUTS: list[Any] = [True, "5", float("nan"), float("inf"), -float("inf"), np.float64("nan")]
NO_TIMEOUTS += [1e9, -1e9, 1e12, 10**400, -(10**400)]


@given(st.integers(0, 200), st.sampled_from(INTEGERS))
def test_every_kind_of_integer_becomes_its_int(value: int, kind: Callable[[int], Any]) -> None:
    found = integer(kind(value), "it")
    assert found == value and type(found) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_a_value_that_is_no_integer_is_a_type_error_that_names_the_argument(value: Any) -> None:
    with pytest.raises(TypeError, match="offset must be a whole number"):
        integer(value, "offset")


def test_a_timeout_is_a_number_or_a_timedelta_and_zero_if_it_is_negative() -> None:
    for value in TIMEOUTS:
        assert seconds(value) == 5.0 and type(seconds(value)) is float
    for value in (-1, -0.1, datetime.timedelta(-1), np.float32(-2)):
        assert seconds(value) == 0.0
    assert [seconds_or(value, 7.0) for value in (None, datetime.timedelta(seconds=5), 0)] == [7.0, 5.0, 0.0]


@pytest.mark.parametrize("value", NO_TIMEOUTS, ids=repr)
def test_a_timeout_is_never_a_wait_without_an_end(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout="):
        seconds(value)


def test_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="size=0 is out of range: at least 1"):
        integer_in(0, "size", 1)
    with pytest.raises(ValueError, match="size=9 is out of range: 1 to 8"):
        integer_in(np.int64(9), "size", 1, 8)
    with pytest.raises(ValueError, match="size=0 is out of range: 1 to 8"):
        integer_in(0, "size", 1, 8)
    assert [integer_in(number, "size", 1, 8) for number in (1, 8)] == [1, 8] and integer_in(9, "size", 9) == 9


def test_what_is_left_of_a_timeout_falls_to_zero_and_no_timeout_has_none() -> None:
    left, over = time_left(datetime.timedelta(seconds=60)), time_left(-1)
    first, later = left(), left()
    assert first is not None and later is not None and 60.0 >= first >= later > 0.0
    assert over() == 0.0 and time_left(None)() is None


def refuse(calls: list[Callable[[Any], object]], values: list[Any], error: Any = TypeError) -> None:
    """Check that each call refuses each of the values."""
    for value, call in product(values, calls):
        with pytest.raises(error):
            call(value)


@pytest.mark.parametrize("two_ranks", ["inproc", "shm"], indirect=True)
@on_ranks_of("two_ranks")
def test_a_communicator_takes_whole_numbers_of_every_kind(comm: Communicator) -> None:
    x, peer = torch.ones(4), 1 - comm.rank
    for kind in INTEGERS:
        for op in ("broadcast", "reduce", "gather", "scatter"):
            *arguments, _ = collective(op, comm.rank, 2, 4, root=1).arguments
            getattr(comm, op)(*arguments, kind(1))
        comm.all_to_all_single(torch.empty(4), x, [kind(2), kind(2)], [kind(2), kind(2)])
        comm.batch_send_recv([Send(x, kind(peer), kind(7)), Recv(torch.empty(4), kind(peer), kind(7))])
        (comm.send if comm.rank else comm.recv)(x, kind(peer), kind(7))
        comm.broadcast_object("word", kind(1))
    calls: list[Callable[[Any], object]] = [
        lambda bad: comm.broadcast(x, bad),
        lambda bad: comm.reduce(x, bad),
        lambda bad: comm.gather(x, None, bad),
        lambda bad: comm.scatter(x, None, bad),
        lambda bad: comm.all_to_all_single(torch.empty(4), x, [bad, 2], [2, 2]),
        lambda bad: comm.send(x, bad),
        lambda bad: comm.send(x, peer, bad),
        lambda bad: comm.recv(x, bad),
        lambda bad: comm.batch_send_recv([Recv(x, bad)]),
        lambda bad: comm.broadcast_object(None, bad),
        lambda bad: comm.split([bad]),
    ]
    refuse(calls, NO_INTEGERS)
    refuse([lambda late: comm.all_reduce(x, timeout=late)], NO_TIMEOUTS, (TypeError, ValueError))
    for timeout in TIMEOUTS:
        comm.all_reduce(x, timeout=timeout, async_op=True).wait(timeout)


@pytest.mark.parametrize("two_ranks", ["inproc", "shm", *second_tier("ucx")], indirect=True)
@on_ranks_of("two_ranks")
def test_a_window_takes_whole_numbers_of_every_kind_and_no_destination_that_shares_memory(comm: Communicator) -> None:
    one = torch.ones(1, dtype=torch.int64)
    with comm.window(torch.zeros(4, dtype=torch.int64)) as window:
        for kind in INTEGERS:
            peer = kind(1 - comm.rank)
            window.put(one, peer, kind(2))
            window.get(one.clone(), peer, kind(3), timeout=datetime.timedelta(seconds=5))
            window.fetch_add(peer, kind(0), kind(1))
            window.compare_swap(peer, kind(1), kind(0), kind(3))
            window.signal(peer)
            window.wait_signal(peer)
            window.flush(peer)
        calls: list[Callable[[Any], object]] = [
            lambda bad: window.put(one, bad),
            lambda bad: window.put(one, 0, bad),
            lambda bad: window.get(one, 0, bad),
            lambda bad: window.fetch_add(0, bad, 1),
            lambda bad: window.fetch_add(0, 0, bad),
            lambda bad: window.compare_swap(0, 0, bad, 1),
            lambda bad: window.signal(bad),
            lambda bad: window.wait_signal(bad),
        ]
        refuse(calls, NO_INTEGERS)
        with pytest.raises(ValueError, match="dst share memory"):
            window.get(one.expand(4), 0)
        comm.barrier()


def test_planes_and_stores_take_numbers_of_every_kind() -> None:
    one, weights = torch.ones(1), {"x": torch.ones(1)}
    with comms.memory("inproc") as plane, plane.expose(torch.ones(4)) as region:
        for kind in INTEGERS:
            plane.read(region.handle, one, kind(4), timeout=datetime.timedelta(seconds=5)).wait()
        refuse([lambda bad: plane.read(region.handle, one, bad)], NO_INTEGERS)
        refuse([lambda late: plane.read(region.handle, one, timeout=late)], NO_TIMEOUTS, (TypeError, ValueError))
    with WeightStore("memory://", keep=np.int64(20), timeout=datetime.timedelta(seconds=10)) as store:
        for version, kind in enumerate(INTEGERS):
            store.publish(kind(version), weights, part=kind(0), parts=kind(1), timeout=np.float32(5))
            assert store.get(kind(version), weights, timeout=datetime.timedelta(seconds=5)) == version
        refuse([lambda bad: store.publish(bad, weights)], NO_INTEGERS, (TypeError, ValueError))
        refuse([lambda late: store.wait(0, late)], NO_TIMEOUTS, (TypeError, ValueError))


def test_sessions_and_clusters_take_numbers_of_every_kind(tmp_path: Path) -> None:
    quick = Timeouts(heartbeat=datetime.timedelta(milliseconds=100), suspect=np.float32(1), join=np.int64(20))  # type: ignore[arg-type]
    assert quick == Timeouts(heartbeat=0.1, suspect=1.0, join=20.0)
    for late in (*NO_TIMEOUTS, 0, -1.0):
        with pytest.raises(ValueError, match="timeout join="):
            Timeouts(join=late)
    LocalCluster(np.int64(2), "inproc", np.int8(1), timeout=datetime.timedelta(seconds=5))  # type: ignore[arg-type]
    refuse([lambda bad: LocalCluster(bad, "inproc")], NO_INTEGERS)
    connect: Any = partial(comms.connect, "inproc", rendezvous=f"file://{tmp_path}/meet")
    connect(rank=np.int64(0), size=np.int8(1)).close()
    refuse([lambda bad: connect(rank=bad, size=1)], [bad for bad in NO_INTEGERS if bad is not None])
    waits: list[Callable[[Any], object]] = [
        lambda late: LocalCluster(2, "inproc", timeout=late),
        lambda late: connect(rank=0, size=1, timeout=late),
        DONE.wait,
    ]
    refuse(waits, ["5", float("nan")], (TypeError, ValueError))


# -- objects


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class Point(msgspec.Struct):
    x: Any


@dataclasses.dataclass
class Pair:
    first: Any


def deep(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


endless = list[Any]()
endless.append(endless)

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.binary()
objects = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=20)


@given(objects)
def test_an_accepted_object_arrives_as_it_was(obj: Any) -> None:
    assert repr(decode_object(encode_object(obj))) == repr(obj), "a text tells all types apart, and is equal for NaN"


@pytest.mark.parametrize(
    "bad",
    [
        {1, 2},
        frozenset([1]),
        decimal.Decimal("1.5"),
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        datetime.timedelta(1),
        uuid.UUID(int=1),
        Colour.RED,
        Number.ONE,
        Word.HELLO,
        np.float64(1),
        np.int64(1),
        np.ones(2),
        torch.ones(2),
        bytearray(b"1"),
        memoryview(b"1"),
        1j,
        object(),
        int,
        2**70,
        -(2**63) - 1,
        10**5000,
        "\ud800",
        {(1, 2): 3},
        {Colour.RED: 1},
        {1.5: {None: {1}}},
        deep(500),
        deep(100_000),
        endless,
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_an_object_that_would_arrive_as_another_type_is_a_type_error(bad: Any) -> None:
    for obj in (bad, [0, {"key": bad}], Point(bad), Pair(bad)):
        with pytest.raises(TypeError, match="msgpack"):
            encode_object(obj)


def test_tuples_arrive_as_lists_and_records_as_dicts_and_an_error_says_where_an_object_is() -> None:
    sent = ((1, 2), Point([1]), Pair({"a": (3,)}))
    assert decode_object(encode_object(sent)) == [[1, 2], {"x": [1]}, {"first": {"a": [3]}}]
    with pytest.raises(TypeError, match=r"the object\['a'\]\[1\]\['first'\] is a set"):
        encode_object({"a": [0, Pair({1})]})
    with pytest.raises(TypeError, match=r"a key of the object\['a'\] is a tuple"):
        encode_object({"a": {(1,): 2}})


# -- global settings of torch


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.thorough)])
def test_a_whole_session_runs_under_another_default_device_and_dtype(backend: str) -> None:
    def tally_up_under_other_settings(session: Session, gate: str) -> dict[str, Any]:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        return tally_up(session, gate=gate)

    with cluster(2, backend, spares=1, fault="commit.before_prepare:5:1:3") as ranks:
        job = start_with_spares(ranks, tally_up_under_other_settings)
        assert_exact(job, job.results(), 2)


@contextmanager
def set_by(call: Callable[[Any], object], value: object, default: object) -> Iterator[None]:
    call(value)
    yield
    call(default)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "default dtype": lambda: set_by(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: set_by(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks_of("two_ranks")
def test_every_op_runs_under_every_setting(comm: Communicator, setting: str) -> None:
    with SETTINGS[setting]():
        peer, ones = 1 - comm.rank, torch.ones(8, device=CPU)
        for count in (8, 40_000):
            for op in COLLECTIVES:
                collective(op, comm.rank, 2, count, root=1).run(comm)
            given = torch.full((count,), comm.rank + 1.0, device=CPU)
            comm.all_reduce(given, reproducible=count == 8)
            comm.all_reduce(given[::2], ReduceOp.MAX)
            comm.all_to_all_single(given, given, [count // 2] * 2, [count // 2] * 2)
            comm.all_reduce(given, async_op=True).wait()
        assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": 0}, {"rank": 1}]
        assert comm.broadcast_object([1, "two"], 0) == [1, "two"]
        if comm.backend != "gloo":
            with comm.window(torch.zeros(8, device=CPU)) as window:
                comm.barrier()
                window.put(ones, peer)
                comm.barrier()
                window.get(torch.empty(8, device=CPU), peer)
                comm.barrier()
        comm.barrier()  # threads share the setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_planes_and_the_store_run_under_every_setting(setting: str) -> None:
    with SETTINGS[setting]():
        weights = {"weight": torch.ones(8, device=CPU), "large": torch.ones(1 << 18, device=CPU)}
        into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        with comms.memory("shm") as plane, plane.expose(weights["weight"], writable=True) as region:
            plane.write(region.handle, weights["weight"]).wait()
            plane.read(region.handle, into["weight"]).wait()
        with WeightStore("memory://") as store:
            store.publish(1, weights)
            store.get("latest", into)
        assert all(torch.equal(into[name], weights[name]) for name in weights)
