"""An op that is refused before any byte moves leaves the communicator usable, as the conformance kit checks too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from holdfast.comms import Communicator, ReduceOp, collectives
from holdfast.comms.errors import HoldfastError, Unsupported
from holdfast.comms.transport.base import Transport
from holdfast.harness import LocalCluster

fast_and_checked = pytest.mark.parametrize("checks", ["0", "1"], indirect=True)
shared_code = pytest.mark.parametrize(
    "two_ranks",
    ["inproc", "shm", "gloo", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ucx", "mpi"))],
    indirect=True,
)
on_processes = pytest.mark.parametrize(
    "two_ranks", ["shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)], indirect=True
)


def _works(comm: Communicator) -> bool:
    total = torch.ones(4)
    comm.all_reduce(total)
    comm.all_reduce(total, async_op=True).wait()
    return total.tolist() == [comm.size**2] * 4 and comm.over is None


class Refusing:
    """A transport without one op."""

    def __init__(self, comm: Communicator) -> None:
        self._kind = type(comm.transport)

    def __enter__(self) -> None:
        def refuse(*args: Any) -> None:
            raise Unsupported("avg of uint64 on this device", "sum, and divide on the host")

        self._before = {name: getattr(self._kind, name) for name in ("all_reduce", "function")}
        self._kind.all_reduce = refuse  # type: ignore[method-assign]
        self._kind.function = Transport.function  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        for name, method in self._before.items():
            setattr(self._kind, name, method)


def _unsupported(comm: Communicator) -> list[str]:
    """Call ops of a transport that refuses them."""
    wrong, before = [], comm.progress
    for refused in (
        lambda: comm.all_reduce(torch.ones(4, dtype=torch.int16), ReduceOp.AVG),
        lambda: comm.all_reduce(torch.ones(4, 2)[:, 0], async_op=True).wait(),
    ):
        comm.barrier()
        with Refusing(comm):
            try:
                refused()
                wrong.append("it was taken")
            except Unsupported:
                pass
            comm.barrier()
        if not _works(comm):
            wrong.append(f"{comm.over}")
    # 2 x 4 ops, and two refused ones, of which the asynchronous one keeps its number
    return wrong + ["ops are numbered differently"] * (comm.progress[0] - before[0] != 9)


@on_processes
def test_a_communicator_works_after_a_transport_refused_an_op(two_ranks: LocalCluster) -> None:
    assert two_ranks.run(_unsupported) == [[], []]


@contextmanager
def _without_memory_for_a_copy() -> Iterator[None]:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError("for a copy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "packed", fail)
        yield


def _prepare_fails(comm: Communicator) -> list[str]:
    """One rank has no memory for a copy; it calls the op again, which then completes."""
    wrong, view = [], torch.ones(4, 2)[:, 0]
    if comm.rank == 0:
        with _without_memory_for_a_copy():
            for call in (lambda: comm.all_reduce(view), lambda: comm.all_reduce(view, timeout=5.0)):
                with pytest.raises(MemoryError):
                    call()
    comm.all_reduce(view)
    if view.tolist() != [2.0] * 4 or comm.progress[0] != 1:
        wrong.append(f"{view.tolist()} {comm.progress}")
    return wrong + [f"{comm.over}"] * (not _works(comm))


@fast_and_checked
@on_processes
def test_an_op_that_could_not_be_prepared_can_be_called_again(two_ranks: LocalCluster) -> None:
    assert two_ranks.run(_prepare_fails) == [[], []]


def _later_ops_wait(comm: Communicator) -> bool:
    """Ops are queued behind one that rank 0 cannot prepare: none may pair with that op of another rank."""
    view = torch.ones(4, 2)[:, 0]
    with _without_memory_for_a_copy() if comm.rank == 0 else nullcontext():
        first = comm.all_reduce(view, async_op=True)
        with pytest.raises(HoldfastError):
            comm.all_reduce(torch.full((4,), 100.0), async_op=True).wait(20.0)
        with pytest.raises((MemoryError, HoldfastError)):
            first.wait(20.0)
    return comm.over is not None


@pytest.mark.parametrize("two_ranks", ["shm"], indirect=True)
def test_an_asynchronous_op_that_could_not_be_prepared_ends_the_communicator(two_ranks: LocalCluster) -> None:
    assert two_ranks.run(_later_ops_wait) == [True, True]


def _modes(comm: Communicator) -> list[str]:
    """Run asynchronous ops with tensors that only the caller's modes (inference, no_grad) allow to write."""
    wrong = []
    kind = type(comm.transport)
    seen: list[tuple[bool, bool]] = []
    original = kind.barrier

    def barrier(self: Any, deadline: float) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        original(self, deadline)

    modes: dict[str, Callable[[], Any]] = {
        "gradients": torch.enable_grad,
        "no gradients": torch.no_grad,
        "inference": torch.inference_mode,
    }
    for name, mode in modes.items():
        with mode():
            for make in (
                lambda: torch.ones(4, 2)[:, 0],
                lambda: torch.ones(4),
                lambda: torch.ones(4, requires_grad=not torch.is_inference_mode_enabled()),
                lambda: torch.ones(4, dtype=torch.float16),
                lambda: torch.ones(4, dtype=torch.complex64).conj(),
            ):
                tensor = make()
                try:
                    comm.all_reduce(tensor, async_op=True).wait()
                    comm.broadcast(tensor, 0, async_op=True).wait()
                    comm.all_gather(
                        [torch.empty(4, 2, dtype=tensor.dtype)[:, 0] for _ in range(2)], tensor, True
                    ).wait()
                except HoldfastError as error:
                    return [f"{name}: {error}"]
                if tensor.tolist() != [2.0] * 4:
                    wrong.append(f"{name}: {tensor.tolist()}")
            if comm.backend != "inproc":  # its ranks share the class
                kind.barrier = barrier  # type: ignore[method-assign]
                try:
                    comm.barrier(async_op=True).wait()
                finally:
                    kind.barrier = original  # type: ignore[method-assign]
                if seen[-1] != (torch.is_inference_mode_enabled(), torch.is_grad_enabled()):
                    wrong.append(f"{name}: {seen[-1]}")
    outside = torch.inference_mode()(lambda: torch.ones(4, 2)[:, 0])()
    comm.all_reduce(outside, async_op=True).wait()
    comm.all_reduce(outside)
    return wrong + ["an inference tensor"] * (outside.tolist() != [4.0] * 4)


@shared_code
def test_asynchronous_ops_run_with_the_modes_of_their_caller(two_ranks: LocalCluster) -> None:
    assert two_ranks.run(_modes) == [[], []]


def _deep() -> list[object]:
    nested: list[object] = []
    for _ in range(3000):
        nested = [nested]
    return nested


def _objects(comm: Communicator) -> list[str]:
    """On one rank an object is refused; every rank gets the error, and the next objects are paired rightly."""
    wrong = []
    for number, unsendable in enumerate(({1, 2}, 1 << 70, "\ud800", {(1, 2): 3}, torch.ones(2), _deep(), object())):
        odd = number % comm.size
        for gathers in (True, False):
            obj = unsendable if comm.rank == odd else "fine"
            try:
                comm.all_gather_object(obj) if gathers else comm.broadcast_object(obj, odd)
                wrong.append(f"{number} was sent")
            except TypeError as error:
                if comm.rank != odd and f"rank {odd} could not send its object" not in str(error):
                    wrong.append(f"{number}: {error}")
            if comm.all_gather_object([number, comm.rank]) != [[number, rank] for rank in range(comm.size)]:
                wrong.append(f"after {number}")
            if comm.broadcast_object(number if comm.rank == odd else None, odd) != number:
                wrong.append(f"after {number}")
    return wrong


@fast_and_checked
@shared_code
def test_an_object_that_cannot_be_sent_takes_its_turn(two_ranks: LocalCluster) -> None:
    assert two_ranks.run(_objects) == [[], []]
