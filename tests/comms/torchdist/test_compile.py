"""`torch.compile` over holdfast: collectives stay in the graph, have gradients, and overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.harness import LocalCluster
from support.torch_groups import ENVIRON, on_each_rank_of

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    """Two processes that compile in the process itself."""
    environ = {**ENVIRON, "HOLDFAST_BACKEND": "shm", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with LocalCluster(2, "shm", timeout=300.0, environ=environ) as cluster:
        yield cluster


@on_each_rank_of("pair")
def test_a_compiled_ddp_model_has_the_gradients_of_ddp(rank: int, size: int) -> None:
    """Uses dynamo's DDP optimizer, which splits the graph at the two buckets."""

    torch.manual_seed(0)
    layers = [nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    compiled = torch.compile(model, backend="aot_eager")
    data = torch.full((4, 8), rank + 1.0)

    def gradients(forward: object) -> list[torch.Tensor]:
        model.zero_grad()
        assert callable(forward)
        forward(data).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain, fast = gradients(model), gradients(compiled)
    assert len(plain) == len(fast) == 6
    for one, other in zip(plain, fast, strict=True):
        torch.testing.assert_close(one, other)


@on_each_rank_of("pair")
def test_inductor_moves_computation_between_a_collective_and_its_wait(rank: int, size: int) -> None:
    """One graph without a break, in the order that inductor gives gloo's collectives, too."""

    import torch.distributed._functional_collectives as functional
    from torch._inductor.utils import run_and_get_code

    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return total + 1, weight @ weight

    passes: dict[str, object] = {"reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"]}
    compiled = torch.compile(step, fullgraph=True, options={"reorder_for_compute_comm_overlap": True, **passes})
    arguments = torch.full((4,), rank + 1.0), torch.eye(8)
    (total, product), (code, *_) = run_and_get_code(compiled, *arguments)
    assert total.tolist() == [7.0] * 4
    assert torch.equal(product, torch.eye(8))
    calls = ["_c10d_functional.all_reduce_.default(", "extern_kernels.mm(", "_c10d_functional.wait_tensor.default("]
    places = [code.index(call) for call in calls]
    assert places == sorted(places)


@on_each_rank_of("pair")
def test_compiled_collectives_have_the_gradients_of_torchs(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        swapped = functional.all_to_all_single_autograd(gathered * (rank + 1), None, None, group)
        return functional.reduce_scatter_tensor_autograd(swapped**2, "sum", 0, group).sum()

    x = torch.tensor([1.0, 2.0]) + rank
    x.requires_grad_()
    loss(x).backward()
    # Each rank sends y_r = (r + 1) * [x_0, x_1]; the square of y_r's elements is in the loss of one rank.
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2 * (1 + 4) * value for value in x.tolist()])
