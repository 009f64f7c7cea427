"""Gradients that do not depend on who computed which shard: for DistributedDataParallel and for `fully_shard`.

Both add up what their ranks have in an order that depends on how many ranks there are. Here every shard of a step gives
a contribution of its own, and all contributions of all ranks are added up exactly, so that the bits are the same
whoever died. That costs one gradient of memory for each of a rank's shards.

    sums = ShardSums(attempt)
    model = sums.data_parallel(model)               # or sums.fully_sharded(model)
    for turn in sums.turns():
        loss = model(batch(attempt.step, turn.shard)).loss / attempt.total_shards
        loss.backward()

With `fully_shard` over a mesh of two dimensions, replicas of shards (HSDP), it is the same. Where ranks work together
on the same shards (tensor parallelism), say which dimension divides the data: `ShardSums(attempt, mesh["data"])`. What
tensor parallelism adds up itself, it adds up in its own order: there the bits depend on how many ranks take part.
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
from holdfast.ft.attempt import Attempt

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Turn:
    """One forward and backward. `counts` is False where a rank has fewer shards than others and only keeps step with
    them: it computes `shard` once more, and what it computes is not added."""

    shard: int
    counts: bool
    last: bool


class ShardSums:
    """The gradients of one attempt: the exact sum over all its shards, on all ranks, once the last turn is over."""

    def __init__(self, attempt: Attempt, data: DeviceMesh | None = None) -> None:
        """`data` is the mesh whose ranks divide the shards among them, if that is not all ranks.

        Raises ValueError for a `data` of more than one dimension that does not hold all ranks.
        """
        self._attempt = attempt
        self._comm = attempt.comm if data is None else _communicator(attempt.comm, data)
        self._turn: Turn | None = None
        self._replica: nn.parallel.DistributedDataParallel | None = None
        self._earlier: list[dict[nn.Parameter, Tensor]] = []
        self._parameters: list[nn.Parameter] = []

    def turns(self) -> Iterator[Turn]:
        """As many turns on every rank; run one forward and backward in each.

        Raises HoldfastError if there are more ranks than shards: then some have nothing to compute.
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
            with self._quietly(turn):
                yield turn
        self._turn = None

    @property
    def turn(self) -> Turn:
        """The turn that is under way."""
        if self._turn is None:
            raise HoldfastError("a backward outside of turns(): write `for turn in sums.turns():`")
        return self._turn

    # -- data parallel

    def data_parallel(self, module: nn.Module, **options: Any) -> nn.Module:
        """`module` in a DistributedDataParallel (which takes `options`) over this attempt's epoch; collective.

        A replica cannot outlive its group, so there is one for each epoch. It is kept with the process group: the
        next attempt of the same epoch gets the same one.
        """
        group = self._attempt.process_group()
        kept = group.kept.get(id(module))
        if not isinstance(kept, _Replica):
            replica = nn.parallel.DistributedDataParallel(module, process_group=group, **options)
            kept = group.kept[id(module)] = _Replica(self._attempt.comm, replica)
        kept.sums = self
        self._replica = kept.module
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        return kept.module

    @contextlib.contextmanager
    def _quietly(self, turn: Turn) -> Iterator[None]:
        """Of a data-parallel model all turns but the last stay on this rank, and what they gave is put aside."""
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
        """This rank's contributions to one bucket of gradients, laid out like `buffer`, that of the last turn."""
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
        """`model`, to whose modules `fully_shard` was applied, over this attempt's epoch. Gradients are summed, not
        averaged: divide the loss by the number of shards."""
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
    """A data-parallel model of one epoch, and what it does with each bucket of gradients in the last turn."""

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
        """Take its hooks from the model's parameters, whoever still holds it: the next replica has hooks of its own,
        and this one may be in the middle of a backward. They go with torch's reducer.
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
    """What `fully_shard` calls with the gradients of one of its groups of parameters, in every turn.

    It adds up what it is given over the turns; so all but the last give zeros. torch allocates room for a group's
    gradients and for this rank's part of their sum; reduces and scatters the one into the other, if there is more than
    one part; adds up the parts of replicas, if there are any; and calls the hook.
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
        """The sum, to the first replica; to the others what changes nothing when torch adds it to that."""
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
        """The sum where every rank has all, in place of what torch has added up of this turn."""
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
    """That of the ranks of `data`, in whose order shards are divided."""
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
