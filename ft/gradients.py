"""Gradients that do not depend on who computed which shard: for DistributedDataParallel and for `fully_shard`.

Both add up what their ranks have in an order that depends on how many ranks there are. Here every shard of a step gives
a contribution of its own, and all contributions of all ranks are added up exactly, so that the bits are the same
whoever died. That costs one gradient of memory for each of a rank's shards.

    sums = ShardSums(attempt)
    model = sums.data_parallel(model)               # or sums.fully_sharded(model)
    for turn in sums.turns():
        loss = model(batch(attempt.step, turn.shard)).loss / SHARDS
        loss.backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.comms.communicator import Communicator
from holdfast.comms.errors import HoldfastError
from holdfast.comms.exact_sum import add_exactly
from holdfast.comms.reproducible import scatter_contributions, sum_contributions
from holdfast.ft.attempt import Attempt

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

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._turn: Turn | None = None
        self._replica: nn.parallel.DistributedDataParallel | None = None
        self._earlier: list[dict[nn.Parameter, Tensor]] = []
        self._parameters: list[nn.Parameter] = []

    def turns(self) -> Iterator[Turn]:
        """As many turns on every rank; run one forward and backward in each.

        Raises HoldfastError if there are more ranks than shards: then some have nothing to compute.
        """
        shards, rounds = self._attempt.shards, self._attempt.rounds
        if not shards:
            raise HoldfastError(
                f"rank {self._attempt.rank} of {self._attempt.comm.size} has no shard; give the session at least as "
                "many shards as ranks"
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
                sums = module.holdfast_sums = _ShardedSum(self._attempt.comm)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if self._attempt.comm.size > 1:
                    module.set_custom_reduce_scatter(sums)
                else:
                    module.set_all_reduce_hook(sums.alone)
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

    It adds up what it is given over the turns; so all but the last give zeros.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._parts: list[Tensor] = []
        self.sums: ShardSums | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        turn = self._take(input_tensor)
        if turn.last:
            scatter_contributions(self._comm, self._parts, output_tensor)
            self._parts.clear()
        else:
            output_tensor.zero_()

    def alone(self, gradients: Tensor) -> None:
        """The same where one rank has all: in place."""
        turn = self._take(gradients)
        if turn.last:
            add_exactly(self._parts, gradients)
            self._parts.clear()
        else:
            gradients.zero_()

    def _take(self, gradients: Tensor) -> Turn:
        assert self.sums is not None
        turn = self.sums.turn
        if turn.counts:
            self._parts.append(gradients.clone())
        return turn
