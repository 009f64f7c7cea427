"""TorchTitan's `ParallelDims` over the mesh that a session makes for an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def epoch_dims(mesh: DeviceMesh, parallelism: Any) -> Any:
    """A `ParallelDims` that has its meshes from `mesh`, of `mesh_of`, and makes none of its own.

    Its own would be groups of the default group, and outlive the epoch.
    """
    from torchtitan.distributed import ParallelDims

    names = ("dp_replicate", "fsdp", "tp")
    replicate, shard, tensor = (mesh[name].size() for name in names)
    dims = ParallelDims(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=1,
        tp=tensor,
        pp=1,
        ep=1,
        world_size=mesh.size(),
        spmd_backend=parallelism.spmd_backend,
    )
    dims._world_mesh = mesh
    dims._global_meshes = {"dense": mesh}
    dims._single_axis_meshes = {name: mesh[name] for name in names}
    return dims
