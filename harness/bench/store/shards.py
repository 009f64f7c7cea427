"""The shards of one worker, as a rank of FSDP that publishes or of tensor parallelism that gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.harness.bench.store import data
from holdfast.harness.bench.store.drivers import WorkerPlan
from holdfast.harness.bench.store.wire import Prepare, TensorShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Shards:
    """What a rank of `ranks` has of `tensors`; `readers` ranks get them."""

    tensors: Sequence[TensorShape]
    rank: int
    ranks: int
    readers: int
    mesh: DeviceMesh

    @staticmethod
    def of(order: Prepare, plan: WorkerPlan) -> Shards:
        """Join the other workers of the role, over gloo."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        publishers, readers = order.sharded or (1, 1)
        ranks = publishers if plan.role == "publisher" else readers
        if not dist.is_initialized():
            meeting = (plan.folder / f"{plan.role}s").as_uri()
            dist.init_process_group("gloo", init_method=meeting, rank=plan.rank, world_size=ranks)
        return Shards(order.tensors, plan.rank, ranks, readers, init_device_mesh("cpu", (ranks,)))

    def give(self, source: data.State) -> data.State:
        """The DTensors of a publisher: views of its source."""
        local = data.shard(source, data.fsdp_dim, self.rank, self.ranks)
        return data.as_dtensors(local, self.tensors, data.fsdp_dim, self.mesh)

    def target(self) -> data.State:
        """New shards of a reader."""
        whole = {each.name: data.on_meta(each) for each in self.tensors}
        local = data.shard(whole, data.tensor_parallel_dim, self.rank, self.ranks)
        return data.target([TensorShape(each.name, each.dtype, tuple(local[each.name].shape)) for each in self.tensors])

    def take(self, target: data.State) -> data.State:
        """The DTensors of a reader, over its shards."""
        return data.as_dtensors(target, self.tensors, data.tensor_parallel_dim, self.mesh)

    def digests(self, source: data.State) -> tuple[tuple[int, ...], ...]:
        """The digests of the shards of each reader."""
        shards = (data.shard(source, data.tensor_parallel_dim, rank, self.readers) for rank in range(self.readers))
        return tuple(map(data.digests, shards))
