"""The conformance kit's collectives over built-in backends, random programs, and ranks that disagree about an op.

They get an error about sizes, dtypes and, over shared memory, roots even without checks; with HOLDFAST_CHECK=1 about
all that ranks must agree on.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, HoldfastError, Mismatch, Recv, ReduceOp, Revoked, Send, Unsupported
from holdfast.comms.executor import Agreement
from holdfast.comms.tensors.packing import DTYPES
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.collectives import *  # noqa: F403
from holdfast.harness.conformance.reductions import *  # noqa: F403
from support.comms.collectives import COLLECTIVES, collective
from support.comms.ranks import on_ranks, on_ranks_of, second_tier, shared_ranks

COUNTS = (4, 100_000)
DISAGREE: dict[str, Callable[[int], torch.Tensor]] = {
    "dtype": lambda count: torch.full((count,), 7, dtype=torch.int32),
    "itemsize": lambda count: torch.full((count // 2,), 7, dtype=torch.float64),
    "shorter": lambda count: torch.full((count - 1,), 7.0),
    "longer": lambda count: torch.full((count + 1,), 7.0),
    "much longer": lambda count: torch.full((count + 400_000,), 7.0),
    "nothing": lambda count: torch.zeros(0),
}
"""Messages that rank 0 sends to a rank that receives a number of float32."""


@on_ranks(2, "inproc", "shm", "gloo", "ucx", "mpi", checks="0", timeout=120.0)
def test_a_message_of_another_size_or_dtype_is_a_mismatch(comm: Communicator) -> None:
    assert len(DTYPES) <= 64, "there is room for each in the tag of a message"
    for batch, what, count in product((False, True), DISAGREE, COUNTS):
        if comm.backend == "mpi" and what in ("dtype", "itemsize"):
            continue  # the tag that MPI compares has no room for a dtype
        with comm.split([0, 1]) as part:
            message = Recv(torch.zeros(count), 0, 3) if comm.rank else Send(DISAGREE[what](count), 1, 3)
            with pytest.raises(Mismatch) if comm.rank else contextlib.suppress(HoldfastError):
                if batch:
                    part.batch_send_recv([message])
                else:
                    (part.recv if comm.rank else part.send)(message.tensor, 1 - comm.rank, 3)


@on_ranks(2, "inproc")
def test_only_ops_that_all_ranks_join_are_counted_as_progress(comm: Communicator) -> None:
    for op in COLLECTIVES:
        before = comm.progress[0]
        collective(op, comm.rank, comm.size, 4).run(comm)
        assert comm.progress[0] - before == (op != "batch_send_recv"), op
    before = comm.progress[0]
    (comm.recv if comm.rank else comm.send)(torch.zeros(4), 1 - comm.rank)
    assert comm.progress[0] == before


threads = shared_ranks(3, "inproc", checks="0")


@on_ranks_of("threads")
def test_a_rank_may_name_the_sizes_that_it_sends_and_takes_from_itself_what_it_gives(comm: Communicator) -> None:
    sizes = {0: ([2, 1, 3], None), 1: (None, [1, 2, 2]), 2: (None, [3, 2, 2])}
    sends, receives = sizes[comm.rank]
    received = torch.empty(sum(receives or [6]))
    given = torch.arange(6.0) + 10 * comm.rank
    comm.all_to_all_single(received, given, receives, sends)
    expected = {0: [0, 1, 10, 11, 20, 21], 1: [2, 12, 13, 22, 23], 2: [3, 4, 5, 14, 15, 24, 25]}
    assert received.tolist() == expected[comm.rank]
    outputs = [torch.zeros(3 if rank == comm.rank else 4) for rank in range(3)]
    with pytest.raises(ValueError, match=rf"outputs\[{comm.rank}\]"):
        comm.all_to_all(outputs, [torch.zeros(4)] * 3)


@on_ranks(2, "inproc", "shm", "ucx", checks="0")
def test_a_collective_of_another_dtype_is_a_mismatch(comm: Communicator) -> None:
    """At least one of the ranks gets it."""
    for op, count in product(("all_reduce", "broadcast", "all_gather"), COUNTS):
        with comm.split([0, 1]) as part:
            call = collective(op, comm.rank, 2, count, dtype=torch.float32 if comm.rank else torch.int32)
            said = ""
            try:
                getattr(part, op)(*call.arguments)
            except HoldfastError as error:
                said = type(error).__name__
        assert Mismatch.__name__ in comm.all_gather_object(said), (op, count)


LONG = (1,) * 64
"""A shape whose description is longer than the first message of the checks."""

DIFFER: dict[str, Callable[[Communicator], object]] = {
    "destination": lambda comm: comm.reduce(torch.ones(LONG), comm.rank),
    "shape": lambda comm: comm.all_reduce(torch.ones(LONG[: 62 + comm.rank])),
    "reproducible": lambda comm: comm.all_reduce(torch.ones(LONG), reproducible=bool(comm.rank)),
    "source of objects": lambda comm: comm.broadcast_object("x", comm.rank),
}


@on_ranks(2, "inproc", "shm", "gloo", *second_tier("ucx", "mpi"), checks="1", timeout=30.0)
def test_with_checks_ranks_learn_whatever_they_disagree_about(comm: Communicator) -> None:
    for what, act in DIFFER.items():
        with comm.split([0, 1]) as part:
            with pytest.raises(Mismatch) as caught:
                act(part)
            assert "rank 0 called" in str(caught.value) and "rank 1 called" in str(caught.value), what


descriptions = st.builds(
    lambda start, repeats, end: start * repeats + end,
    st.sampled_from(["", "all_reduce", "ü", "(1, "]),
    st.sampled_from([0, 1, 50, 500]),
    st.sampled_from(["", "a", "b", "\0"]),
)


@given(words=st.lists(descriptions, min_size=3, max_size=3))
def test_descriptions_agree_only_if_they_are_equal(threads: LocalCluster, words: list[str]) -> None:
    def agree(comm: Communicator) -> str:
        try:
            Agreement(comm.transport).check(words[comm.rank], time.monotonic() + 30.0)
        except Mismatch as error:
            return str(error)
        return ""

    said = threads.run(agree)
    assert len(set(said)) == 1, "all ranks raise the same"
    assert bool(said[0]) == (len(set(words)) > 1)
    if said[0]:
        assert all(f"called {word}" in said[0] for word in words)


@on_ranks(2, "inproc", "shm", checks="0")
def test_over_shared_memory_other_roots_are_found_when_the_ranks_meet_next(comm: Communicator) -> None:
    """Each rank takes itself for the root, and `later` ops with one root follow; then all ranks meet."""
    ops: list[tuple[str, dict[str, float]]] = [(op, {}) for op in ("broadcast", "scatter", "reduce", "gather")]
    for later, (op, options) in product((0, 1, 3), [*ops, ("broadcast", {"timeout": 20.0})]):
        with comm.split([0, 1]) as part:
            part.broadcast(torch.ones(1), 1)
            with pytest.raises(HoldfastError) as caught:
                getattr(part, op)(*collective(op, comm.rank, 2, 2, root=comm.rank).arguments, **options)
                for _ in range(later):
                    part.broadcast(torch.ones(2), 0)
                part.barrier()
            assert isinstance(caught.value, Mismatch) or re.search("Mismatch|root", str(caught.value)), (op, later)


# the conformance kit runs over these
SIZES = ["inproc-1", "inproc-3", "shm-1", "shm-2", "shm-3", "gloo-3", "ucx-3", "mpi-3"]
ranks = shared_ranks(3, *SIZES, *second_tier("gloo-1", "ucx-1", "mpi-1"))  # alone all that send messages are the same


@on_ranks(2, "shm", checks="0")
def test_a_disagreement_without_checks_neither_hangs_nor_gives_wrong_results(comm: Communicator) -> None:
    """Direct transports compare ops in any case: else they would read each other's memory wrongly.

    Inputs of up to 40 bytes, ten floats, are on one line with the description of the op; larger ones are not.
    """
    for counts in ((50_000, 4), (11, 10), (10, 11), (4, 5), (1, 0)):
        with comm.split([0, 1]) as part, pytest.raises((Mismatch, Revoked)):
            part.all_reduce(torch.ones(counts[comm.rank]), timeout=5.0)


# random programs of ops with random shapes, dtypes and layouts


Tensor = torch.Tensor

DTYPE_NAMES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
)  # fmt: skip
REDUCTIONS = ("sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum", "reproducible")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
MOVING = (
    "broadcast", "all_gather", "all_gather_single", "all_to_all", "all_to_all_single", "gather", "scatter",
    "batch_send_recv", "pair", "object", "barrier",
)  # fmt: skip
LAYOUTS = ("plain", "transposed", "strided", "offset")


@dataclass(frozen=True, slots=True)
class Step:
    """One op. `counts` are rows by rank, for ops that take uneven parts."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    reduction: str
    layout: str
    root: int
    counts: tuple[int, ...]
    later: bool
    seed: int


small = st.lists(st.integers(0, 4), max_size=5).map(tuple)
shapes = st.one_of(small, small, st.sampled_from([(1,), (0, 3), (1025,), (3, 700), (20_000,), (2, 1, 3, 1, 2)]))
"""0-d to 5-d; empty ones, and a few that no single message of a small slot holds."""


def programs(size: int) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        op=st.sampled_from(REDUCING + MOVING),
        dtype=st.sampled_from(DTYPE_NAMES),
        shape=shapes,
        reduction=st.sampled_from(REDUCTIONS),
        layout=st.sampled_from(LAYOUTS),
        root=st.integers(0, size - 1),
        counts=st.lists(st.integers(0, 3), min_size=size, max_size=size).map(tuple),
        later=st.booleans(),
        seed=st.integers(0, 1000),
    )
    return st.lists(step, min_size=1, max_size=6)


def run(comm: Communicator, program: list[Step]) -> list[Any]:
    """The result of each step on this rank: checksums of bytes, or "unsupported"."""
    outcomes: list[Any] = []
    for number, step in enumerate(program):
        try:
            outcomes.append([_checksum(tensor) for tensor in _step(comm, step, number)])
        except Unsupported:
            outcomes.append("unsupported")
    return outcomes


def _checksum(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    data = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    return tuple(tensor.shape), zlib.crc32(bytes(data.view(torch.uint8).numpy()) if data.numel() else b"")


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """A tensor of equal numbers in another layout: transposed, with gaps, or in the middle of something larger."""
    if layout == "transposed" and values.dim() > 1:
        backwards = tuple(reversed(range(values.dim())))
        return values.permute(backwards).contiguous().permute(backwards)
    if layout == "strided" and values.dim():
        wide = values.new_empty((*values.shape[:-1], 2 * values.shape[-1]))
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset":
        wide = values.new_empty(values.numel() + 3)
        wide[1 : 1 + values.numel()] = values.reshape(-1)
        return wide[1 : 1 + values.numel()].view(values.shape)
    return values.clone()


def _numbers(step: Step, shape: tuple[int, ...], rank: int) -> Tensor:
    values = (torch.arange(math.prod(shape)) * 7 + step.seed + rank) % 3
    dtype: torch.dtype = getattr(torch, step.dtype)
    if step.reduction == "product":
        values = values % 2 + 1
    return _laid_out(values.to(dtype).view(shape), step.layout)


def _step(comm: Communicator, step: Step, number: int) -> list[Tensor]:
    rank, size, root, exact = comm.rank, comm.size, step.root, step.reduction == "reproducible"
    mine, width = _numbers(step, step.shape, rank), step.shape[:2]
    rows = [_numbers(step, (count, *width), rank) for count in step.counts]
    taken, at_root = [torch.zeros_like(row) for row in rows], rank == root
    mine_for_all = [_numbers(step, (step.counts[rank] * step.counts[r], *width), rank + r) for r in range(size)]
    taken_of_all = [torch.zeros_like(each) for each in mine_for_all]
    to_me = [step.counts[(r + rank) % size] for r in range(size)]
    by_rows, stacked = _numbers(step, (sum(to_me), *width), rank), _numbers(step, (size, *step.shape), rank)
    into_rows, into_stacked, other = (_laid_out(torch.zeros_like(x), step.layout) for x in (by_rows, stacked, mine))
    op = ReduceOp.premul_sum(0.5) if step.reduction == "premul_sum" else ReduceOp("sum" if exact else step.reduction)  # type: ignore[arg-type]
    match step.op:
        case "pair" if size > 1:
            if at_root:
                comm.send(mine, (root + 1) % size, tag=number)
            elif rank == (root + 1) % size:
                comm.recv(mine, root, tag=number)
            return [mine]
        case "object":
            said = [comm.broadcast_object({"seed": step.seed + rank}, root), comm.all_gather_object(step.counts[rank])]
            return [torch.frombuffer(bytearray(repr(said).encode()), dtype=torch.uint8)]
    ring = [Send(mine, (rank + 1) % size, 5), Recv(other, (rank - 1) % size, 5)]
    calls: dict[str, tuple[list[Any], list[Tensor]]] = {
        "all_reduce": ([mine, op], [mine]),
        "reduce": ([mine, root, op], [mine]),
        "reduce_scatter": ([taken[rank], rows, op], [taken[rank]]),
        "reduce_scatter_single": ([mine, stacked, op], [mine]),
        "broadcast": ([mine, root], [mine]),
        "all_gather": ([taken, rows[rank]], taken),
        "all_gather_single": ([into_stacked, mine], [into_stacked]),
        "all_to_all": ([taken_of_all, mine_for_all], taken_of_all),
        "all_to_all_single": ([into_rows, by_rows, to_me, to_me], [into_rows]),
        "gather": ([rows[rank], taken if at_root else None, root], taken),
        "scatter": ([taken[rank], rows if at_root else None, root], [taken[rank]]),
        "batch_send_recv": ([ring], [other]),
    }
    if size == 1:
        del calls["batch_send_recv"]
    arguments, results = calls.get(step.op, ([], []))
    more = {"reproducible": exact} if step.op == "all_reduce" else {}
    getattr(comm, step.op if step.op in calls else "barrier")(*arguments, async_op=step.later, **more).wait()
    return results


quick = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


Outcome = Callable[[str, int, list[list[Step]]], list[object]]


@pytest.fixture
def outcome() -> Iterator[Outcome]:
    """A function that runs programs, on clusters that stay alive from example to example."""
    with ExitStack() as opened:

        @cache
        def cluster(backend: str, size: int) -> LocalCluster:
            return opened.enter_context(LocalCluster(size, backend, timeout=90.0))

        def run_all(backend: str, size: int, several: list[list[Step]]) -> list[object]:
            return list(cluster(backend, size).run(lambda comm: [run(comm, each) for each in several]))

        yield run_all


def several(size: int) -> st.SearchStrategy[list[list[Step]]]:
    """Of one communicator, since connecting takes longer than most programs."""
    return st.lists(programs(size), min_size=1, max_size=4)


@pytest.mark.parametrize("size", [3, *second_tier(8)])
@settings(quick, max_examples=8)
@given(data=st.data())
def test_any_program_gives_the_same_on_every_backend(
    process_backend: str, outcome: Outcome, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    expected = outcome("inproc", size, given_programs)
    assert outcome(process_backend, size, given_programs) == expected


@settings(quick, max_examples=25)
@given(size=st.integers(1, 8), data=st.data())
def test_any_program_gives_the_same_in_each_run_with_one_to_eight_ranks(
    outcome: Outcome, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    first = outcome("inproc", size, given_programs)
    assert outcome("inproc", size, given_programs) == first
    for number, program in enumerate(given_programs):
        for place, step in enumerate(program):
            if step.op == "all_reduce":  # every rank has the same
                assert len({repr(of_rank[number][place]) for of_rank in first}) == 1  # type: ignore[index]
