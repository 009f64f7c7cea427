"""`fake`: a rank without the others counts what it would move, and is never taken by mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast import comms
from holdfast.backends.fake import FakeCall, FakeTransport
from holdfast.comms import Communicator, ReduceOp, Revoked, Unsupported
from holdfast.comms.plugins.registry import registry
from holdfast.harness.conformance.run import run


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with comms.connect("fake", rank=3, size=1000) as made:
        yield made


def test_it_counts_shapes_and_bytes(comm: Communicator) -> None:
    for _ in range(3):
        comm.all_reduce(torch.ones(4, 8))
    comm.all_reduce(torch.ones(2, dtype=torch.float16), async_op=True).wait()
    comm.send(torch.ones(5, dtype=torch.uint8), 7)
    comm.barrier()
    counted = comm.transport
    assert isinstance(counted, FakeTransport)
    assert counted.calls[FakeCall("all_reduce", torch.float32, ((4, 8),), 128)] == 3
    assert (counted.bytes_of("all_reduce"), counted.bytes_of("send"), counted.bytes_of("barrier")) == (388, 5, 0)
    assert (comm.rank, comm.size, comm.info.transport) == (3, 1000, "nothing")


@pytest.mark.parametrize(
    ("op", "result"),
    [(ReduceOp.SUM, 3000.0), (ReduceOp.AVG, 3.0), (ReduceOp.MAX, 3.0), (ReduceOp.premul_sum(0.5), 1500.0)],
)
def test_the_other_ranks_are_as_this_one(comm: Communicator, op: ReduceOp, result: float) -> None:
    tensor = torch.full((2,), 3.0)
    comm.all_reduce(tensor, op)
    assert tensor.tolist() == [result] * 2


def test_moves_give_copies_of_this_ranks_tensors(comm: Communicator) -> None:
    output = torch.zeros(1000, 2)
    comm.all_gather_single(output, torch.tensor([1.0, 2.0]))
    assert output[999].tolist() == [1.0, 2.0]
    assert comm.all_gather_object({"rank": 3}) == [{"rank": 3}] * 1000
    comm.all_to_all_single(output, torch.arange(2000.0).view(1000, 2))
    assert output[0].tolist() == output[999].tolist() == [6.0, 7.0]
    part = torch.zeros(2)
    comm.reduce_scatter_single(part, torch.arange(2000.0), ReduceOp.MIN)
    assert part.tolist() == [6.0, 7.0]
    comm.broadcast(part, 0)
    assert part.tolist() == [6.0, 7.0]


def test_splits_and_ends_are_as_of_any_communicator(comm: Communicator) -> None:
    assert comm.split([0, 1]) is None
    comm.abort("enough")
    with pytest.raises(Revoked, match="enough"):
        comm.barrier()


def test_it_is_only_taken_by_its_name() -> None:
    assert all("fake" not in registry().by_priority(purpose) for purpose in ("cpu", "cuda", "memory"))
    for preference in ("fake,gloo", "gloo,fake"):
        with pytest.raises(Unsupported, match="'fake' in a preference list"):
            comms.connect(preference, rank=0, size=2)
    with pytest.raises(ValueError, match="out of range"):
        comms.connect("fake", rank=2, size=2)


def test_the_conformance_kit_does_not_apply() -> None:
    with pytest.raises(Unsupported, match="conformance of 'fake'"):
        run("fake")
