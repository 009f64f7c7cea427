"""Exact sums of gradients over all shards of a step, for DistributedDataParallel and `fully_shard`.

Both of them sum in an order that depends on the number of ranks. Here every shard of a step is a contribution of its
own, and the contributions of all ranks are summed exactly. So the bits do not depend on which rank computed which
shard, and are the same after a death. That costs one gradient of memory for each shard of a rank.

    sums = ShardSums(attempt)
    model = sums.data_parallel(model)               # or sums.fully_sharded(model)
    for turn in sums.turns():
        loss = model(batch(attempt.step, turn.shard)).loss / attempt.total_shards
        loss.backward()

`fully_shard` over a mesh of two dimensions (HSDP) is used alike. If ranks work together on the same shards (tensor
parallelism), name the mesh dimension that divides the data: `ShardSums(attempt, mesh["data"])`. The sums of tensor
parallelism itself are torch's: their bits depend on the number of ranks that take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.reproducible import scatter_contributions, sum_contributions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from holdfast.ft.session import Attempt

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Turn:
    """One forward and backward, of shard `shard`; `last` is True for the rank's last turn of the attempt.

    `counts` is False on a rank with fewer shards than others: it computes `shard` once more to stay in step, and the
    result is not added."""

    shard: int
    counts: bool
    last: bool


class ShardSums:
    """The gradients of one attempt: the exact sum over all shards, on all ranks, once the last turn is over.

    It is a sum, not an average: divide each shard's loss by `attempt.total_shards`."""

    def __init__(self, attempt: Attempt, data: DeviceMesh | None = None) -> None:
        """`data` is the mesh of the ranks that divide the shards, if that is not all ranks.

        Raises ValueError for a `data` of more than one dimension that does not hold all ranks.
        """
        self._attempt = attempt
        self._comm = attempt.comm if data is None else _communicator(attempt.comm, data)
        self._turn: Turn | None = None
        self._replica: nn.parallel.DistributedDataParallel | None = None
        self._earlier: list[dict[nn.Parameter, Tensor]] = []
        self._parameters: list[nn.Parameter] = []

    def turns(self) -> Iterator[Turn]:
        """Yield the turns, equally many on every rank; run one forward and backward in each.

        Raises HoldfastError if there are more ranks than shards: some ranks would have nothing to compute.
        """
        part, parts, total = self._comm.rank, self._comm.size, self._attempt.total_shards
        shards, rounds = self._attempt.share(part, parts), -(-total // parts)
        if total < parts:
            raise HoldfastError(
                f"{parts} ranks divide {total} shards: some would have none; give the session at least as many shards"
            )
        for number in range(rounds):
            turn = Turn(shards[min(number, len(shards) - 1)], number < len(shards), number == rounds - 1)
            self._turn = turn
            with self._without_communication(turn):
                yield turn
        self._turn = None

    @property
    def turn(self) -> Turn:
        """The current turn. Raises HoldfastError outside of `turns()`."""
        if self._turn is None:
            raise HoldfastError("a backward outside of turns(): write `for turn in sums.turns():`")
        return self._turn

    # -- data parallel

    def data_parallel(self, module: nn.Module, **options: Any) -> nn.Module:
        """`module` in a DistributedDataParallel (with `options`) over this attempt's epoch; collective.

        A replica cannot outlive its group, so each epoch has its own. It is kept with the process group: the next
        attempt of the same epoch gets the same replica.
        """
        group = self._attempt.process_group()
        kept = group.dependents.get(id(module))
        if not isinstance(kept, _Replica):
            replica = nn.parallel.DistributedDataParallel(module, process_group=group, **options)
            kept = group.dependents[id(module)] = _Replica(self._attempt.comm, replica)
        kept.sums = self
        self._replica = kept.module
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        return kept.module

    @contextlib.contextmanager
    def _without_communication(self, turn: Turn) -> Iterator[None]:
        """Run a turn of a data-parallel model; without communication, unless it is the last, and keep its gradients."""
        if self._replica is None:
            yield
            return
        for parameter in self._parameters:
            parameter.grad = None
        if turn.last:
            yield
            self._earlier.clear()
            return
        with self._replica.no_sync():
            yield
        if turn.counts:
            self._earlier.append({each: each.grad for each in self._parameters if each.grad is not None})

    def bucket(self, parameters: Sequence[nn.Parameter], views: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
        """This rank's contributions to one bucket of gradients, laid out like `buffer`, the bucket of the last turn."""
        found = [buffer.clone()] if self.turn.counts else []
        for gradients in self._earlier:
            flat = torch.zeros_like(buffer)
            for parameter, view in zip(parameters, views, strict=True):
                if parameter in gradients:
                    begin = view.storage_offset() - buffer.storage_offset()
                    flat[begin : begin + view.numel()].copy_(gradients[parameter].view(-1))
            found.append(flat)
        return found

    # -- fully sharded

    def fully_sharded(self, model: nn.Module) -> nn.Module:
        """`model`, after `fully_shard` was applied to its modules, over this attempt's epoch.

        Gradients are summed, not averaged: divide the loss by `attempt.total_shards`. Raises ValueError if
        `fully_shard` was applied to no module."""
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            raise ValueError("fully_shard() was applied to no module of this model")
        module: Any
        for module in sharded:
            sums: Any = getattr(module, "holdfast_sums", None)
            if sums is None:
                sums = module.holdfast_sums = _ShardedSum(self._comm)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_reduce_scatter(sums)
                module.set_all_reduce_hook(sums.replicated)
            sums.sums = self
        return model


class _Replica:
    """A data-parallel model of one epoch, and the hook that sums its gradient buckets in the last turn."""

    def __init__(self, comm: Communicator, module: nn.parallel.DistributedDataParallel) -> None:
        self.module = module
        self.sums: ShardSums | None = None
        self._comm = comm

        def exact_sum_of_shards(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
            return self._reduce(bucket)

        exact_sum_of_shards.__annotations__ = {}  # torch compares them with types of its own
        untyped: Any = module
        untyped.register_comm_hook(None, exact_sum_of_shards)

    def end(self) -> None:
        """Remove this replica's hooks from the model's parameters, by dropping torch's reducer.

        The next replica has hooks of its own, and this one may be in the middle of a backward or still referenced.
        """
        module: Any = self.module
        module.logger = module.reducer = None
        self.sums = None

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        assert self.sums is not None
        buffer = bucket.buffer()
        parts = self.sums.bucket(bucket.parameters(), bucket.gradients(), buffer)
        sum_contributions(self._comm, parts, buffer)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


class _ShardedSum:
    """The reduce-scatter that `fully_shard` calls with the gradients of one group of parameters, in every turn.

    FSDP2 accumulates the results over the turns, so all turns but the last return zeros. In each turn torch allocates
    the group's gradients and this rank's part of their sum, reduces and scatters the one into the other if there is
    more than one part, all-reduces the parts of replicas if there are any, and calls the hook.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._parts: list[Tensor] = []
        self._given: Tensor | None = None
        self.sums: ShardSums | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        room = torch.empty(*size, dtype=dtype, device=device)
        if self._given is None:
            self._given = room
        return room

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum on the first replica, and -0.0 on the others, which changes nothing when torch adds it."""
        self._given = None
        turn = self._take(input_tensor)
        if turn.last:
            if self._comm.rank >= group.size():
                output_tensor.fill_(-0.0)
            scatter_contributions(self._comm, self._parts, output_tensor, parts=group.size())
            self._parts.clear()
        else:
            output_tensor.zero_()

    def replicated(self, gradients: Tensor) -> None:
        """If every rank has all gradients, replace torch's sum of this turn by the exact one."""
        if self._given is None:
            return
        turn, self._given = self._take(self._given), None
        if turn.last:
            sum_contributions(self._comm, self._parts, gradients)
            self._parts.clear()
        else:
            gradients.zero_()

    def _take(self, gradients: Tensor) -> Turn:
        assert self.sums is not None
        turn = self.sums.turn
        if turn.counts:
            self._parts.append(gradients.clone())
        return turn


def _communicator(comm: Communicator, data: DeviceMesh) -> Communicator:
    """The communicator of the ranks of `data`; their order divides the shards."""
    if data.mesh.flatten().tolist() == list(range(comm.size)):
        return comm
    if data.ndim != 1:
        raise ValueError(
            f"data is a mesh of {tuple(data.shape)}: give one dimension of a mesh, or several as one: "
            "mesh['replicate', 'shard']._flatten('data')"
        )
    group: Any = data.get_group()
    found: Communicator = group.communicator
    return found
