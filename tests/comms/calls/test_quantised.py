"""A quantised all_reduce keeps its bound; with feedback errors do not add up; one that fails changes nothing."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.comms import Communicator, PeerFailed, ReduceOp, Revoked, Unsupported
from holdfast.comms.codecs.float8_blocks import BLOCK
from holdfast.comms.quantised import ErrorFeedback, all_reduce_quantised, reduce_scatter_quantised
from holdfast.harness import LocalCluster
from support.comms.ranks import on_ranks_of, shared_ranks

BOUND, RESIDUAL_BOUND = 0.13, 0.15


ranks = shared_ranks(2, "inproc-2", "inproc-3", "inproc-4")


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


def four_ops(comm: Communicator) -> bytes:
    feedback, found = ErrorFeedback(), b""
    for step, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16, torch.float16)):
        strided = numbers(comm.rank, step, 2 * 40_000, 7, dtype)[::2]
        all_reduce_quantised(comm, strided, feedback)
        found += bytes(strided.contiguous().view(torch.uint8).numpy())
    assert feedback.residual is not None
    assert feedback.residual.any()
    tensor = torch.full((5,), comm.rank + 1.0)
    tensor[2] = torch.inf
    all_reduce_quantised(comm, tensor, spoilt := ErrorFeedback())
    assert spoilt.residual is not None
    assert spoilt.residual.isfinite().all()
    assert tensor.isnan().tolist() == [False, False, True, False, False]
    return found


def test_all_backends_give_the_same_bits(backend: str) -> None:
    with LocalCluster(3, "inproc") as threads, LocalCluster(3, backend) as cluster:
        assert cluster.run(four_ops) == threads.run(four_ops)


feedback_of_the_process = ErrorFeedback()


def fail_and_go_on(comm: Communicator) -> str:
    """Rank 2 dies in the second op; it has no third."""
    feedback = feedback_of_the_process
    all_reduce_quantised(comm, numbers(comm.rank, 0, 70_000, 1, torch.float32), feedback)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    before, tensor = feedback.residual, numbers(comm.rank, 1, 70_000, 1, torch.float32)
    assert before is not None
    bits = before.clone()
    try:
        all_reduce_quantised(comm, tensor, feedback)
    except (PeerFailed, Revoked) as failure:
        assert feedback.residual is before
        assert torch.equal(before, bits)
        assert torch.equal(tensor, numbers(comm.rank, 1, 70_000, 1, torch.float32))
        return type(failure).__name__
    return "nothing"


@pytest.mark.parametrize("backend_name", ["shm", "gloo"])
def test_an_op_that_fails_leaves_tensor_and_feedback_as_they_were(backend_name: str) -> None:
    with LocalCluster(3, backend_name) as cluster:
        ends = [cluster.outcomes(fail_and_go_on)[rank].value for rank in (0, 1)]
        assert set(ends) <= {"PeerFailed", "Revoked"}, ends
        assert "PeerFailed" in ends


@on_ranks_of("ranks")
def test_a_discarded_result_is_undone_and_tried_again(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    all_reduce_quantised(comm, numbers(comm.rank, 0, 500, 2, torch.float32), feedback)
    results = []
    for _ in range(2):
        tensor = numbers(comm.rank, 1, 500, 2, torch.float32)
        all_reduce_quantised(comm, tensor, feedback)
        results.append(tensor)
        feedback.undo()
    assert torch.equal(*results)


@on_ranks_of("ranks")
def test_what_cannot_be_quantised_is_refused_before_a_byte_moves(comm: Communicator) -> None:
    with pytest.raises(Unsupported, match="float64"):
        all_reduce_quantised(comm, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(Unsupported, match="only sums and averages"):
        all_reduce_quantised(comm, torch.zeros(3), op=ReduceOp.MAX)
    feedback = ErrorFeedback()
    all_reduce_quantised(comm, torch.ones(3), feedback)
    with pytest.raises(ValueError, match="keep one for each tensor"):
        all_reduce_quantised(comm, torch.ones(4), feedback)
    comm.barrier()
