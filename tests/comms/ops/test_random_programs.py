"""Random programs of ops with random shapes, dtypes and layouts give equal bits on every backend."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, Recv, ReduceOp, Send, Unsupported
from holdfast.harness import LocalCluster

Tensor = torch.Tensor

DTYPES = (
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


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """0-d to 5-d; empty ones, and a few that no single message of a small slot holds."""
    small = st.lists(st.integers(0, 4), max_size=5).map(tuple)
    return st.one_of(small, small, st.sampled_from([(1,), (0, 3), (1025,), (3, 700), (20_000,), (2, 1, 3, 1, 2)]))


def programs(size: int, steps: int = 6) -> st.SearchStrategy[list[Step]]:
    """Programs for `size` ranks."""
    step = st.builds(
        Step,
        op=st.sampled_from(REDUCING + MOVING),
        dtype=st.sampled_from(DTYPES),
        shape=shapes(),
        reduction=st.sampled_from(REDUCTIONS),
        layout=st.sampled_from(LAYOUTS),
        root=st.integers(0, size - 1),
        counts=st.lists(st.integers(0, 3), min_size=size, max_size=size).map(tuple),
        later=st.booleans(),
        seed=st.integers(0, 1000),
    )
    return st.lists(step, min_size=1, max_size=steps)


def run(comm: Communicator, program: list[Step]) -> list[Any]:
    """Run a program; the result of each step on this rank: checksums of bytes, or "unsupported"."""
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


PROGRAMS = 4
"""How many programs one communicator runs, since connecting takes longer than most programs."""

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
    return st.lists(programs(size), min_size=1, max_size=PROGRAMS)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.thorough), 3])
@settings(quick, max_examples=8)
@given(data=st.data())
def test_any_program_gives_the_same_on_every_backend(
    process_backend: str, outcome: Outcome, size: int, data: st.DataObject
) -> None:
    given_programs = data.draw(several(size))
    expected = outcome("inproc", size, given_programs)
    assert outcome(process_backend, size, given_programs) == expected


@pytest.mark.thorough
@settings(quick, max_examples=2)
@given(given_programs=several(8))
def test_any_program_gives_the_same_with_eight_processes(
    process_backend: str, outcome: Outcome, given_programs: list[list[Step]]
) -> None:
    expected = outcome("inproc", 8, given_programs)
    assert outcome(process_backend, 8, given_programs) == expected


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
