"""The layout of a policy that TorchTitan shares among the trainers: FSDP2, HSDP and tensor parallelism.

The shards of a batch are summed exactly over all ranks that divide the data. The sums of tensor parallelism are
torch's, so the bits of the weights depend on its degree, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from holdfast import ft
from holdfast.comms import Communicator
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.telemetry import WorkLog
from holdfast.rl.trainers.layouts import Forwards, ShardedUpdate, Tokens, UpdateResult
from holdfast.rl.trainers.policy import PolicyLoss, build_optimizer
from holdfast.rl.trainers.titan.model import TitanModel, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor


class TitanLayout:
    """The trainers have shards of one of TorchTitan's models; the update is made inside of the attempt."""

    def __init__(self, config: RunConfig, source: ModelSource, work: WorkLog) -> None:
        self._config = config.trainer
        self._titan = TitanModel(source, config.titan)
        self._update = ShardedUpdate(config.trainer, PolicyLoss(config, source, titan_logits), work)
        self._mesh: Any = None
        self._things: Any = None
        parallelism = self._titan.parallelism
        self._shape = partial(
            mesh_of,
            replicate=parallelism.data_parallel_replicate_degree,
            tensor=parallelism.tensor_parallel_degree,
        )

    def attach(self, session: ft.Session) -> None:
        self._things = session.attach_sharded(self._build, copies=self._config.copies, mesh=self._shape)

    def attempt(self, attempt: ft.Attempt, forwards: Forwards, before_change: Callable[[], None]) -> UpdateResult:
        first = self._mesh["tp"].get_local_rank() == 0
        sums = ft.ShardSums(attempt, self._data)
        norm = partial(mesh_norm, mesh=self._mesh)
        return self._update.run(attempt, self._things, sums, forwards, before_change, norm, gives_losses=first)

    def logprobs(self, attempt: ft.Attempt, tokens: Tokens) -> Mapping[int, Sequence[Tensor]]:
        found = self._update.logprobs(attempt, self._things, ft.ShardSums(attempt, self._data), tokens)
        return found if self._mesh["tp"].get_local_rank() == 0 else {}

    def committed(self, step: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return self._titan.published(self._things["model"])

    def publishes(self, rank: int) -> bool:
        return True

    def _build(self, mesh: DeviceMesh) -> dict[str, Any]:
        model = self._titan.build(mesh)
        self._mesh = mesh
        self._data = mesh if mesh["tp"].size() == 1 else mesh["dp_replicate", "fsdp"]._flatten("data")
        return {"model": model, "optimizer": build_optimizer(model, self._config)}


def titan_logits(model: torch.nn.Module, tokens: Tensor, kept: int) -> Tensor:
    """The logits (n, kept, words) after the last `kept` tokens, of one of TorchTitan's models."""
    found: Any = model(tokens)
    if hasattr(found, "full_tensor"):
        found = found.full_tensor()
    logits: Tensor = found[:, tokens.shape[1] - kept :]
    return logits


@torch.no_grad()
def mesh_norm(gradients: Sequence[Any], comm: Communicator, mesh: DeviceMesh) -> float:
    """The norm of gradients that are sharded over a mesh of `mesh_of`; collective.

    Each rank adds up its own rows, and then all of them the same list of rows. So the bits depend on the degree of
    tensor parallelism alone.
    """
    tensor = mesh["tp"]
    degree, column = tensor.size(), tensor.get_local_rank()
    copies, copy = mesh["dp_replicate"].size(), mesh["dp_replicate"].get_local_rank()
    parts, part = mesh["fsdp"].size(), mesh["fsdp"].get_local_rank()
    assert copies * parts * degree == mesh.size()
    found = []
    for each in gradients:
        cut = _tensor_cut(each)
        rows = -(-each.shape[0] // degree) if cut == 0 else each.shape[0]
        sums = torch.zeros(degree, rows, dtype=torch.float64, device="cpu")
        local = each.to_local().double()
        if local.numel() and copy == 0 and (cut is not None or column == 0):
            chunk = -(-rows // parts)
            square = local.square().reshape(local.shape[0], -1)
            padded = torch.cat([square, torch.zeros_like(square[:1])])  # never one row, which torch adds up differently
            sums[column, part * chunk : part * chunk + len(square)] = padded.sum(1)[:-1].cpu()
        found.append(sums.flatten())
    rows_of_all = torch.cat(found)
    comm.all_reduce(rows_of_all)  # each row is zero on all ranks but one: exact in any order
    return float(rows_of_all.sum().sqrt())


def _tensor_cut(tensor: Any) -> int | None:
    """The dimension of a tensor that tensor parallelism cuts; None if it is whole on each rank of it."""
    names = tensor.device_mesh.mesh_dim_names or ()
    if "tp" not in names or tensor.device_mesh["tp"].size() == 1:
        return None
    placement = tensor.placements[names.index("tp")]
    return int(placement.dim) if placement.is_shard() else None
