"""Memory that a backend is told of, and tensors on huge pages."""

from __future__ import annotations

import pytest
import torch

from holdfast import comms
from holdfast.comms import Communicator, Revoked
from holdfast.harness import LocalCluster


def register(comm: Communicator) -> str:
    tensor = torch.arange(4 << 20).float()
    with comm.register(tensor) as registration:
        comm.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(4 << 20).float() * comm.size), "its contents and its address stay"
    assert "closed" in repr(registration)
    registration.close()
    small = comm.register(torch.ones(4))
    assert "nothing to gain" in small.info
    with pytest.raises(ValueError, match="contiguous"):
        comm.register(torch.ones(4, 4).t())
    with pytest.raises(TypeError, match="tensor"):
        comm.register([1.0])  # type: ignore[arg-type]
    comm.close()
    with pytest.raises(Revoked):
        comm.register(tensor)
    return registration.info


@pytest.mark.parametrize("backend", ["inproc", "shm", "gloo", "ucx", pytest.param("mpi", marks=pytest.mark.thorough)])
def test_every_backend_says_what_it_did_with_the_memory(backend: str) -> None:
    with LocalCluster(2, backend) as cluster:
        for info in cluster.run(register):
            assert "nothing to gain" in info or (backend == "shm" and "huge pages" in info)


def test_an_empty_tensor_begins_on_a_huge_page_and_can_be_used_as_any() -> None:
    tensor = comms.empty((3, 1 << 20), torch.float32)
    assert tensor.data_ptr() % (2 << 20) == 0 and tensor.shape == (3, 1 << 20) and tensor.is_contiguous()
    assert not tensor.any()
    view = tensor[1:].fill_(2.0)
    del tensor
    assert view.sum().item() == 4 << 20
    assert comms.empty(5, torch.int64).tolist() == [0] * 5
    assert comms.empty((0, 4)).shape == (0, 4)
