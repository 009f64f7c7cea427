"""The libraries that `holdfast bench layer` compares: another one, called in each way, and holdfast over it.

They are in the same processes, each with connections of its own, of the same kind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.comms.system.paths import url_of
from holdfast.harness.bench.collectives.data import Array
from holdfast.harness.bench.collectives.definitions import Operation
from holdfast.harness.bench.drivers.driver import TIMEOUT, BoundOp, LibraryDriver
from holdfast.harness.bench.drivers.gloo import GlooDriver
from holdfast.harness.bench.drivers.holdfast import HoldfastDriver
from holdfast.harness.bench.drivers.mpi import MpiDriver

if TYPE_CHECKING:
    import torch

    from holdfast.comms import Communicator

Call = Callable[[], object]

HOLDFAST = "holdfast"
STAND_IN = "nccl-stand-in"
"""A backend of a plugin that is registered here by hand: nothing imports a backend."""
WAYS = {
    "gloo": ("ProcessGroupGloo.allreduce", "torch.distributed.all_reduce", HOLDFAST),
    "mpi": ("MPI.Comm.Allreduce", HOLDFAST),
    "nccl": ("ProcessGroupNCCL.allreduce", HOLDFAST),
    STAND_IN: ("FakeProcessGroup.allreduce", HOLDFAST),
}
"""By backend, the ways to call. The others are compared with the first."""

_PLUGIN = "holdfast.backends.nccl.stand_in"


class AllReduceDriver(LibraryDriver):
    """An all_reduce alone, on tensors of `device`: `prepare(tensor)` gives the call. It may only queue the op."""

    def __init__(
        self, comm: Communicator, device: str, prepare: Callable[[torch.Tensor], Call], close: Callable[[], object]
    ) -> None:
        self.rank, self.ranks, self.detail = comm.rank, comm.size, device
        self._device, self._prepare, self._close = device, prepare, close

    def bind(self, operation: Operation, source: Array, target: Array) -> BoundOp:
        import torch

        if operation.name != "all_reduce":
            return self.refuse(operation)
        host = torch.from_numpy(source)
        tensor = host.to(self._device)
        return BoundOp(self._prepare(tensor), prepare=lambda: tensor.copy_(host), settle=lambda: host.copy_(tensor))

    def close(self) -> None:
        self._close()


def layered_drivers(backend: str, folder: Path, rank: int, ranks: int) -> Mapping[str, LibraryDriver]:
    """The driver of each of the `WAYS` of a backend, in one process; ranks meet in `folder`."""
    import torch.distributed as dist

    from holdfast import comms

    if backend == STAND_IN:
        comms.register(importlib.import_module(_PLUGIN))
    device = "cuda" if backend == "nccl" else "cpu"
    comm = comms.connect(
        backend, rank=rank, size=ranks, rendezvous=url_of("file", folder / "meeting"), device=device, timeout=TIMEOUT
    )
    drivers: tuple[LibraryDriver, ...]
    if backend == "mpi":
        drivers = MpiDriver(), HoldfastDriver(comm)
    elif backend == STAND_IN:
        queued = partial(_queued, importlib.import_module(_PLUGIN).OneRank())
        drivers = AllReduceDriver(comm, device, queued, lambda: None), HoldfastDriver(comm)
    else:
        store, end = dist.FileStore(str(folder / "group"), ranks), dist.destroy_process_group
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        if backend == "gloo":
            usual = AllReduceDriver(comm, device, lambda tensor: partial(dist.all_reduce, tensor), end)
            drivers = GlooDriver(folder / "direct", rank, ranks), usual, HoldfastDriver(comm)
        else:
            group: Any = dist.distributed_c10d._get_default_group()
            direct = AllReduceDriver(comm, device, partial(_queued, group._get_backend(comm.device)), end)
            ours = AllReduceDriver(comm, device, lambda tensor: partial(comm.all_reduce, tensor), comm.close)
            drivers = direct, ours
    return dict(zip(WAYS[backend], drivers, strict=True))


def _queued(group: Any, tensor: torch.Tensor) -> Call:
    """An all_reduce of torch's own group, on the caller's stream as ours."""
    import torch.distributed as dist

    tensors, options = [tensor], dist.AllreduceOptions()
    options.asyncOp = False

    def call() -> object:
        work = group.allreduce(tensors, options)
        return None if work is None else work.wait()

    return call
