"""torch in tests: process groups over the ranks of a cluster, and small models that train in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.comms import Communicator
from holdfast.harness import LocalCluster
from support.comms.ranks import Test, as_test

T = TypeVar("T")


ENVIRON = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def group_cluster(size: int, backend: str = "shm", timeout: float = 90.0, **environ: str) -> LocalCluster:
    """Processes for process groups; their environment chooses the transport."""
    return LocalCluster(size, backend, timeout=timeout, environ={**ENVIRON, "HOLDFAST_BACKEND": backend, **environ})


def shared_groups(size: int, *backends: Any, timeout: float = 90.0, **environ: str) -> Any:
    """A fixture of a module: the processes of `group_cluster`, over each backend in turn."""

    @pytest.fixture(scope="module", params=backends)
    def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
        with group_cluster(size, str(request.param), timeout, **environ) as processes:
            processes.warm_up()
            yield processes

    return cluster


@contextmanager
def default_group(comm: Communicator, path: Path, backend: str = "holdfast", **options: Any) -> Iterator[None]:
    """A default process group of the ranks of `comm`, which meet in the folder `path`."""
    import holdfast.comms.torchdist  # noqa: F401  # registers the name

    torch.set_num_threads(1)
    options = {"init_method": f"file://{path}/{backend}", "timeout": timedelta(seconds=60)} | options
    dist.init_process_group(backend, rank=comm.rank, world_size=comm.size, **options)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def in_group(cluster: LocalCluster, path: Path, body: Callable[[int, int], T], backend: str = "holdfast") -> list[T]:
    """Call `body(rank, size)` on every rank, inside a default process group."""

    def run(comm: Communicator) -> T:
        with default_group(comm, path, backend):
            return body(comm.rank, comm.size)

    return cluster.run(run)


def on_each_rank_of(fixture: str) -> Callable[[Test], Test]:
    """A test of `body(rank, size, ...)`: all ranks of the fixture's cluster call it, inside a default group."""

    def decorate(body: Test) -> Test:
        def in_default_group(comm: Communicator, path: Path, *more: Any) -> None:
            with default_group(comm, path):
                body(comm.rank, comm.size, *more)

        names = list(inspect.signature(body).parameters)[2:]

        def test(**fixtures: Any) -> None:
            fixtures[fixture].run(in_default_group, fixtures["tmp_path"], *(fixtures[name] for name in names))

        return as_test(test, body, [fixture, "tmp_path", *names])

    return decorate


def tiny_model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)


def losses_of(model: nn.Module, rank: int) -> list[float]:
    """The losses of six steps on data of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    device = next(model.parameters()).device
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(16, 8, device=device)).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_ddp(rank: int, size: int, device: str = "cpu") -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    return losses_of(DistributedDataParallel(tiny_model(device), bucket_cap_mb=0.001), rank)


def train_fsdp2(rank: int, size: int, device: str = "cpu") -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(0)
    model = tiny_model(device)
    mesh = init_device_mesh(kind, (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses_of(model, rank)


def sharded_model(mesh: Any) -> dict[str, Any]:
    """A small model that `mesh` does not divide evenly, sharded with `fully_shard`, and its optimizer."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
