"""How the trainers of a run share a policy: replicated, or sharded (FSDP2).

Either way every shard of a batch is a contribution of its own, and all of them are summed exactly. So the weights after
an update have the same bits on any number of trainers, and after any death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast import ft
from holdfast.comms import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.reproducible import sum_contributions
from holdfast.ft import faultpoints
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import TrainingTokens
from holdfast.rl.telemetry import WorkLog
from holdfast.rl.trainers.policy import Logits, PolicyLoss, build_optimizer, build_policy, merged, transformers_logits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor
Forwards = Callable[[int], Sequence[TrainingTokens]]
"""Returns the forwards of a shard."""

CLIP_EPSILON = 1e-6
"""Added to the norm that a gradient is divided by, as torch does."""


class NonFiniteLoss(HoldfastError):
    """The loss or the gradient of a step is NaN or infinite; the step is not committed."""

    def __init__(self, step: int, loss: float, norm: float) -> None:
        self.step, self.loss, self.norm = step, loss, norm
        super().__init__(
            f"step {step} has the loss {loss} and a gradient of norm {norm}: nothing is committed; look at the rewards "
            "and log-probs of its batch, and lower the learning rate"
        )


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The loss of an update, and the norm of its gradient before it was clipped."""

    loss: float
    norm: float


class ReplicatedLayout:
    """Every trainer has the whole policy; the update is made after the commit."""

    def __init__(self, config: RunConfig, source: ModelSource, work: WorkLog) -> None:
        self._config, self._loss, self._work = config, PolicyLoss(config, source), work
        self._model = build_policy(source, config.model)
        self._optimizer = build_optimizer(self._model, config.trainer)
        self._trained = [each for each in self._model.parameters() if each.requires_grad]
        count = sum(each.numel() for each in self._trained)
        self._total = torch.empty(count, dtype=self._trained[0].dtype, device=self._trained[0].device)
        self._norm = 0.0

    def attach(self, session: ft.Session) -> None:
        """Give the state to the session, before its first step."""
        session.attach("policy", self._model)
        session.attach("optimizer", self._optimizer)

    def attempt(self, attempt: ft.Attempt, forwards: Forwards, before_change: Callable[[], None]) -> UpdateResult:
        """Do one update inside of an attempt; collective. Raises `NonFiniteLoss`.

        `before_change` is called before the weights change, or the attempt ends.
        """
        flats, losses, step = [], [], attempt.step
        for shard in attempt.shards:
            parts = forwards(shard)
            with self._work.doing("forward_backward", step):
                flat, part = self._gradient(parts)
            flats.append(flat)
            losses.append(part)
        with self._work.doing("all_reduce", step):
            self._sum(attempt.comm, flats)
            loss = _reduced_loss(attempt, losses)
        self._norm = float(self._total.double().norm())
        check_finite(attempt.step, loss, self._norm)
        before_change()
        return UpdateResult(loss, self._norm)

    def logprobs(self, attempt: ft.Attempt, forwards: Forwards) -> Mapping[int, Sequence[Tensor]]:
        """The policy's log-probabilities now, of the forwards of each shard that this rank answers for; collective."""
        with self._work.doing("forward", attempt.step):
            return {
                shard: [self._loss.logprobs(self._model, each) for each in forwards(shard)] for shard in attempt.shards
            }

    def committed(self, step: int) -> None:
        """Make the update, after the attempt at `step` was committed."""
        with self._work.doing("optimizer", step):
            self._update(step)

    def _update(self, step: int) -> None:
        scale = clip_factor(self._norm, self._config.trainer.max_norm)
        at = 0
        for parameter in self._trained:
            parameter.grad = self._total[at : at + parameter.numel()].view_as(parameter).mul(scale)
            at += parameter.numel()
        set_rate(self._optimizer, self._config.trainer.rate_at(step))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """The state dict to publish, inside of an attempt; collective with adapters."""
        return merged(self._model) if self._config.model.lora_rank else self._model.state_dict()

    def publishes(self, rank: int) -> bool:
        """Whether this rank has a part to publish."""
        return rank == 0

    def _sum(self, comm: Communicator, flats: Sequence[Tensor]) -> None:
        """Set the total to the sum of all trainers' gradients, which go through memory of `comm`'s device."""
        there = [each.to(comm.device) for each in flats]
        total = self._total if self._total.device == comm.device else torch.empty_like(self._total, device=comm.device)
        sum_contributions(comm, there, total)
        if total is not self._total:
            self._total.copy_(total)

    def _gradient(self, forwards: Sequence[TrainingTokens]) -> tuple[Tensor, Tensor]:
        """The gradient (flat) and the loss of one shard."""
        flat, total = torch.zeros_like(self._total), torch.zeros(1, dtype=torch.float64, device="cpu")
        for forward in forwards:
            loss = self._loss.of(self._model, forward)
            found = torch.autograd.grad(loss, self._trained, allow_unused=True, materialize_grads=True)
            flat += torch.cat([each.reshape(-1) for each in found])
            total += loss.detach().cpu()
        return flat, total


class ShardedLayout:
    """The trainers have shards of the policy (FSDP2); the update is made inside of the attempt.

    Its methods do what those of `ReplicatedLayout` do.
    """

    _shape: Callable[[int], Mapping[str, int]] | None = None
    """The dimensions of the mesh of so many trainers, if it has several."""
    _data: DeviceMesh | None = None
    """The mesh of the trainers that divide the shards of a batch, if that is not all of them."""

    def __init__(
        self, config: RunConfig, source: ModelSource, work: WorkLog, logits: Logits = transformers_logits
    ) -> None:
        self._config, self._source, self._work = config, source, work
        self._loss = PolicyLoss(config, source, logits)
        self._mesh: Any = None
        self._things: Any = None

    def attach(self, session: ft.Session) -> None:
        copies = self._config.trainer.copies
        self._things = session.attach_sharded(self._build, copies=copies, mesh=self._shape)

    def attempt(self, attempt: ft.Attempt, forwards: Forwards, before_change: Callable[[], None]) -> UpdateResult:
        model, optimizer = self._things["model"], self._things["optimizer"]
        sums = ft.ShardSums(attempt, self._data)
        sums.fully_sharded(model)
        optimizer.zero_grad()
        losses = []
        for turn in sums.turns():
            total = torch.zeros(1, dtype=torch.float64, device="cpu")
            parts = forwards(turn.shard)
            for number, forward in enumerate(parts):
                model.set_requires_gradient_sync(number == len(parts) - 1)
                with self._work.doing("forward_backward", attempt.step):  # the model's collectives are within
                    part = self._loss.of(model, forward)
                    torch.autograd.backward(part)
                total += part.detach().cpu()
            if turn.counts and self._answers:
                losses.append(total)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        with self._work.doing("all_reduce", attempt.step):
            loss = _reduced_loss(attempt, losses)
            norm = sharded_norm(gradients, attempt.comm, self._mesh)
        check_finite(attempt.step, loss, norm)
        before_change()
        with self._work.doing("optimizer", attempt.step):
            scale = clip_factor(norm, self._config.trainer.max_norm)
            for each in gradients:
                each.to_local().mul_(scale)
            set_rate(optimizer, self._config.trainer.rate_at(attempt.step))
            optimizer.step()
        return UpdateResult(loss, norm)

    def logprobs(self, attempt: ft.Attempt, forwards: Forwards) -> Mapping[int, Sequence[Tensor]]:
        model, found = self._things["model"], dict[int, Sequence[Tensor]]()
        with self._work.doing("forward", attempt.step):
            for turn in ft.ShardSums(attempt, self._data).turns():
                parts = [self._loss.logprobs(model, each) for each in forwards(turn.shard)]
                if turn.counts and self._answers:
                    found[turn.shard] = parts
            model.reshard()  # without a backward, the root stays gathered
        return found

    def committed(self, step: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        model = self._things["model"]
        state: dict[str, Any] = merged(model) if self._config.model.lora_rank else model.state_dict()
        return state

    def publishes(self, rank: int) -> bool:
        return True

    @property
    def _answers(self) -> bool:
        """Whether this rank answers for its shards: of those that compute the same ones, the first does."""
        return place_in(self._mesh, "tp")[1] == 0

    def _build(self, mesh: DeviceMesh) -> dict[str, Any]:
        self._mesh = mesh
        model = self._model(mesh)
        return {"model": model, "optimizer": build_optimizer(model, self._config.trainer)}

    def _model(self, mesh: DeviceMesh) -> torch.nn.Module:
        """The model with the source's weights, sharded over a mesh."""
        from torch.distributed.fsdp import fully_shard

        model = build_policy(self._source, self._config.model)
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


def clip_factor(norm: float, most: float) -> float:
    """The factor that brings a gradient of this norm to at most `most`."""
    return min(1.0, most / (norm + CLIP_EPSILON))


@torch.no_grad()
def sharded_norm(gradients: Sequence[Any], comm: Communicator, mesh: DeviceMesh) -> float:
    """The norm of gradients that are sharded over a mesh: by rows, and by its dimension "tp"; collective.

    A row lies on one rank, or on those of "tp". Each rank adds up its own rows, and then all of them the same list of
    rows. So the bits depend on the degree of tensor parallelism alone.
    """
    degree, column = place_in(mesh, "tp")
    copies, copy = place_in(mesh, "dp_replicate")
    parts = mesh.size() // degree // copies
    part = place_in(mesh, "fsdp")[1] if mesh.ndim > 1 else mesh.get_local_rank()
    rows_of_all = []
    for each in gradients:
        cut = _tensor_cut(each)
        rows = -(-each.shape[0] // degree) if cut == 0 else each.shape[0]
        sums = torch.zeros(degree, rows, dtype=torch.float64, device="cpu")
        local = each.to_local().double()
        if local.numel() and copy == 0 and (cut is not None or column == 0):
            first = part * -(-rows // parts)
            square = local.square().reshape(local.shape[0], -1)
            padded = torch.cat([square, torch.zeros_like(square[:1])])  # never one row, which torch adds up differently
            sums[column, first : first + len(square)] = padded.sum(1)[:-1].cpu()
        rows_of_all.append(sums.flatten())
    total = torch.cat(rows_of_all)
    comm.all_reduce(total)  # each row is zero on all ranks but one: exact in any order
    return float(total.sum().sqrt())


def place_in(mesh: DeviceMesh, name: str) -> tuple[int, int]:
    """The size of a dimension of a mesh, and this rank's place in it. Without such a dimension: 1, 0."""
    if name not in (mesh.mesh_dim_names or ()):
        return 1, 0
    return mesh[name].size(), mesh[name].get_local_rank()


def _tensor_cut(tensor: Any) -> int | None:
    """The dimension of a tensor that tensor parallelism cuts; None if it is whole on each rank of it."""
    if place_in(tensor.device_mesh, "tp")[0] == 1:
        return None
    placement = tensor.placements[tensor.device_mesh.mesh_dim_names.index("tp")]
    return int(placement.dim) if placement.is_shard() else None


def _reduced_loss(attempt: ft.Attempt, losses: Sequence[Tensor]) -> float:
    """The sum of the losses of all trainers; the second part of the reduction, after the gradients."""
    faultpoints.reach("train.in_reduction", attempt.step, attempt.rank, attempt.epoch)
    total = torch.zeros(1, dtype=torch.float64, device="cpu")
    sum_contributions(attempt.comm, losses, total)
    return float(total)


def check_finite(step: int, loss: float, norm: float) -> None:
    """Raise `NonFiniteLoss` if the loss or the norm is not finite."""
    if not (abs(loss) < float("inf") and norm < float("inf")):
        raise NonFiniteLoss(step, loss, norm)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
