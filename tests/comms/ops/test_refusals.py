"""An op that is refused before any byte moves leaves the communicator usable, as the conformance kit checks too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, ReduceOp, collectives
from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.transport.base import Transport
from support.comms.ranks import MPI, on_ranks_of, second_tier

fast_and_checked = pytest.mark.parametrize("checks", ["0", "1"], indirect=True)
shared_code = pytest.mark.parametrize("two_ranks", ["inproc", "shm", "gloo", *second_tier("ucx", "mpi")], indirect=True)
on_processes = pytest.mark.parametrize("two_ranks", ["shm", "gloo", "ucx", MPI], indirect=True)


def _works(comm: Communicator) -> None:
    total = torch.ones(4)
    comm.all_reduce(total)
    comm.all_reduce(total, async_op=True).wait()
    assert total.tolist() == [comm.size**2] * 4 and comm.over is None


@contextmanager
def refusing(comm: Communicator) -> Iterator[None]:
    """The transport lacks one op."""

    def refuse(*args: Any) -> None:
        raise Unsupported("avg of uint64 on this device", "sum, and divide on the host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(comm.transport), "all_reduce", refuse)
        patch.setattr(type(comm.transport), "function", Transport.function)
        yield


@on_processes
@on_ranks_of("two_ranks")
def test_a_communicator_works_after_a_transport_refused_an_op(comm: Communicator) -> None:
    before = comm.progress[0]
    for refused in (
        lambda: comm.all_reduce(torch.ones(4, dtype=torch.int16), ReduceOp.AVG),
        lambda: comm.all_reduce(torch.ones(4, 2)[:, 0], async_op=True).wait(),
    ):
        comm.barrier()
        with refusing(comm):
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


def _deep() -> list[object]:
    nested: list[object] = []
    for _ in range(3000):
        nested = [nested]
    return nested


@fast_and_checked
@shared_code
@on_ranks_of("two_ranks")
def test_an_object_that_cannot_be_sent_takes_its_turn(comm: Communicator) -> None:
    """On one rank an object is refused; every rank gets the error, and the next objects are paired rightly."""
    for number, unsendable in enumerate(({1, 2}, 1 << 70, "\ud800", {(1, 2): 3}, torch.ones(2), _deep(), object())):
        odd = number % comm.size
        obj = unsendable if comm.rank == odd else "fine"
        words = "." if comm.rank == odd else f"rank {odd} could not send its object"
        for call in (comm.all_gather_object, lambda obj, odd=odd: comm.broadcast_object(obj, odd)):
            with pytest.raises(TypeError, match=words):
                call(obj)
            assert comm.all_gather_object([number, comm.rank]) == [[number, rank] for rank in range(comm.size)]
            assert comm.broadcast_object(number if comm.rank == odd else None, odd) == number
