"""Windows and regions neither crash nor return wrong bytes when the owner gives the tensor other memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from holdfast.comms import Communicator, RegionGone, memory
from holdfast.comms.tensors.memory import ExposedMemory
from holdfast.harness import LocalCluster
from holdfast.harness.conformance.helpers import on_each_rank

COUNT = 1 << 16
PLANES = ["inproc", "shm", "ucx", "nixl"]


@pytest.fixture(scope="module", params=["inproc", "shm", "ucx", "mpi"])
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(2, request.param) as cluster:
        cluster.warm_up()
        yield cluster


def give_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((5,), 9.0)


def set_other(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((2 * COUNT,), 9.0))


def set_same_size(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((COUNT,), 9.0))


def shrink(tensor: torch.Tensor) -> None:
    tensor.resize_(3)


CHANGES = [give_data, set_other, set_same_size, shrink]


def refuses_to_be_resized(tensor: torch.Tensor) -> None:
    for resize in (
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.untyped_storage().resize_(8 * tensor.nbytes),
        lambda: tensor.resize_(2 * COUNT),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            resize()


@pytest.mark.parametrize("change", CHANGES)
def test_a_window_is_closed_when_its_tensor_gets_other_memory(
    ranks: LocalCluster, change: Callable[[torch.Tensor], None]
) -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.full((COUNT,), 2.0)
        window = comm.window(tensor)
        comm.barrier()
        kept = []
        if comm.rank == 1:
            refuses_to_be_resized(tensor)
            change(tensor)
            kept = [torch.full((COUNT,), -1.0) for _ in range(8)]
        comm.barrier()
        if comm.rank == 0:
            got = torch.zeros(COUNT)
            with contextlib.suppress(RegionGone):  # the backend's thread may have closed the window already
                window.put(torch.full((COUNT,), 5.0), 1)
                window.get(got, 1)
                assert bool((got == 5.0).all())
        comm.barrier()
        if comm.rank == 1:
            assert all(bool((each == -1.0).all()) for each in kept)
            with pytest.raises(RegionGone, match=r"other memory .*copy_"):
                window.get(torch.zeros(1), 0)
            assert window.closed
            with pytest.raises(RegionGone, match="this rank has closed"):
                window.get(torch.zeros(1), 0)
            if change is not shrink:
                assert bool((tensor == 9.0).all())
        comm.barrier()
        if comm.rank == 0:
            with pytest.raises(RegionGone, match="rank 1 has closed"):
                window.get(torch.zeros(1), 1)
        comm.barrier()
        window.close()
        comm.barrier()

    ranks.run(body)


@on_each_rank
def test_the_tensor_of_a_closed_window_can_be_used_as_before(comm: Communicator) -> None:
    tensor = torch.full((COUNT,), 2.0)
    with comm.window(tensor):
        comm.barrier()
        if comm.rank == 1:
            tensor.data = torch.full((5,), 9.0)
        comm.barrier()
    assert bool((tensor == (9.0 if comm.rank == 1 else 2.0)).all())
    tensor.resize_(2 * COUNT) if comm.rank == 1 else tensor.add_(1)
    comm.barrier()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PLANES)
def test_a_region_is_closed_when_its_tensor_gets_other_memory(
    name: str, change: Callable[[torch.Tensor], None]
) -> None:
    with memory(name) as plane:
        tensor = torch.full((COUNT,), 2.0)
        region = plane.expose(tensor, writable=True)
        handle = region.handle
        refuses_to_be_resized(tensor)
        change(tensor)
        kept = [torch.full((COUNT,), -1.0) for _ in range(8)]
        got = torch.zeros(COUNT)
        plane.read(handle, got).wait()
        assert bool((got == 2.0).all())
        plane.write(handle, torch.full((COUNT,), 5.0)).wait()
        assert all(bool((each == -1.0).all()) for each in kept)
        with pytest.raises(RegionGone, match=r"other memory .*copy_"):
            assert region.handle
        with pytest.raises(RegionGone):
            plane.read(handle, got).wait()
        assert region.handle == handle, "a closed region keeps its handle"
        region.close()


class Named(torch.nn.Parameter):
    """A subclass, like the parameters of many libraries."""


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_exposed_memory_of_any_kind_keeps_its_size(kind: torch.dtype) -> None:
    for tensor in (
        torch.zeros(10, dtype=kind),
        torch.zeros(10, dtype=kind)[2:5],
        Named(torch.zeros(10, dtype=kind), requires_grad=kind.is_floating_point),
        torch.zeros(0, dtype=kind),
    ):
        exposed = ExposedMemory(tensor)
        with pytest.raises(RuntimeError):
            tensor.untyped_storage().resize_(1 << 20)
        assert not exposed.moved
        tensor.data = torch.zeros(3, dtype=kind)
        assert exposed.moved
