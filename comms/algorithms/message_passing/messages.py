"""Collectives for transports that only pass messages: a backend supplies three primitives.

`cost` chooses the algorithm from the size, the number of ranks and two measured constants that all ranks share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from holdfast.comms import arithmetic
from holdfast.comms.algorithms.message_passing import algorithms, cost
from holdfast.comms.algorithms.message_passing.exchange import Exchange, Posted
from holdfast.comms.errors import Unsupported
from holdfast.comms.ops import TAGS, OpPlan, ReduceOp
from holdfast.comms.transport.base import Context, Link, Transport

Tensor = torch.Tensor

_OP_TAGS = 1 << 20
"""The number of tags for collectives, one an op, from `TAGS` on; the tags below are the user's."""

_MOST_CHOICES = 256
"""The ops and sizes for which a transport remembers the algorithm."""

_ALGORITHMS: dict[str, dict[str, Callable[..., None]]] = {
    "all_reduce": {
        "doubling": algorithms.doubling_all_reduce,
        "halving": algorithms.halving_all_reduce,
        "ring": algorithms.ring_all_reduce,
    },
    "broadcast": {"binomial": algorithms.binomial_broadcast, "pipeline": algorithms.pipelined_broadcast},
    "all_gather": {"bruck": algorithms.bruck_all_gather, "ring": algorithms.ring_all_gather},
}


class MessageTransport(Transport):
    """A transport over tagged messages between pairs of ranks."""

    def __init__(self, context: Context, link: Link) -> None:
        self.rank, self.size = context.rank, context.size
        self._link = self._agree(context, link)
        self._hinted = context.hints.get(cost.ALGORITHM.name)
        self._algorithms: dict[tuple[str, int, str | None], Callable[..., None]] = {}
        self._op = 0
        self._rounds = 0
        self._journal = context.journal

    def _agree(self, context: Context, link: Link) -> Link:
        """The cost of a message, the same on every rank."""
        return cost.agree(context, link)

    @abstractmethod
    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Posted:
        """Begin to send a contiguous tensor; it is not changed until the message is complete."""

    @abstractmethod
    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Posted:
        """Begin to receive into a contiguous tensor. Messages of one source and tag arrive in order.

        A message of another size is a `Mismatch` when it completes.
        """

    @abstractmethod
    def _complete(self, posted: Sequence[Posted], deadline: float, op: str, seq: int) -> None:
        """Wait until all of them are complete; raise `OpTimeout`, `PeerFailed` or what `abort` was given.

        Increments `_rounds`, and tells `_journal` of a long wait.
        """

    def _exchange(self, op: str, deadline: float) -> Exchange:
        """Begin an op; returns the exchange over which its algorithm runs."""
        self._op += 1
        self._rounds = 0
        tag = TAGS + self._op % _OP_TAGS
        return Exchange(
            self._post_send, self._post_recv, self._complete, self.rank, self.size, tag, op, self._op, deadline
        )

    def _algorithm(self, op: str, nbytes: int) -> Callable[..., None]:
        """The algorithm that a hint names, else the cheapest; chosen once for each op and size."""
        asked = self.op_hints.get(cost.ALGORITHM.name)
        key = op, nbytes, asked
        if (algorithm := self._algorithms.get(key)) is None:
            costs = cost.OPS[op](self._link, self.size, nbytes)
            if asked is not None and asked not in costs:
                raise Unsupported(f"{op} by the algorithm {asked!r}", f"it has {', '.join(costs)}")
            named: str = asked or self._hinted or ""
            if len(self._algorithms) >= _MOST_CHOICES:
                self._algorithms.clear()
            algorithm = _ALGORITHMS[op][named if named in costs else cost.choose(costs)]
            self._algorithms[key] = algorithm
        return algorithm

    def function(self, plan: OpPlan) -> Callable[..., None]:
        reduction = plan.reduction
        plain = reduction is not None and reduction.name not in arithmetic.SCALED
        if plan.op != "all_reduce" or not plain or not plan.nbytes or self.size == 1:
            return super().function(plan)
        return partial(self._algorithm("all_reduce", plan.nbytes), partial(self._exchange, "all_reduce"), reduction)

    # -- reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp, deadline: float) -> None:
        scaled = arithmetic.prescale(tensor, op)
        if scaled is not tensor:
            tensor.copy_(scaled)
        if tensor.numel() and self.size > 1:
            self._algorithm("all_reduce", tensor.nbytes)(partial(self._exchange, "all_reduce"), op, tensor, deadline)
        arithmetic.postscale(tensor, op, self.size)

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp, deadline: float) -> None:
        exchange = self._exchange("reduce", deadline)
        total = arithmetic.prescale(tensor, op).view(-1)
        if self.rank != dst and total.data_ptr() == tensor.data_ptr():
            total = total.clone()
        if tensor.numel():
            algorithms.binomial_reduce(exchange, total, dst, op)
        if self.rank == dst:
            if total.data_ptr() != tensor.data_ptr():
                tensor.view(-1).copy_(total)
            arithmetic.postscale(tensor, op, self.size)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp, deadline: float) -> None:
        exchange = self._exchange("reduce_scatter", deadline)
        given = [arithmetic.prescale(tensor, op).view(-1) for tensor in inputs]
        output.view(-1).copy_(algorithms.reduce_scatter(exchange, given, op))
        arithmetic.postscale(output, op, self.size)

    # -- moves

    def broadcast(self, tensor: Tensor, src: int, deadline: float) -> None:
        exchange = self._exchange("broadcast", deadline)
        if tensor.numel():
            self._algorithm("broadcast", tensor.nbytes)(exchange, tensor.view(-1), src)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, deadline: float) -> None:
        exchange = self._exchange("all_gather", deadline)
        algorithms.copy_own(outputs[self.rank], tensor)
        flats = [output.view(-1) for output in outputs]
        self._algorithm("all_gather", max(flat.nbytes for flat in flats))(exchange, flats)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], deadline: float) -> None:
        algorithms.all_to_all(self._exchange("all_to_all", deadline), outputs, inputs)

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, deadline: float) -> None:
        algorithms.gather(self._exchange("gather", deadline), tensor, outputs, dst)

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, deadline: float) -> None:
        algorithms.scatter(self._exchange("scatter", deadline), tensor, inputs, src)

    def barrier(self, deadline: float) -> None:
        algorithms.barrier(self._exchange("barrier", deadline))

    # -- point to point

    def send(self, tensor: Tensor, dst: int, tag: int, deadline: float) -> None:
        self._complete([self._post_send(tensor, dst, tag)], deadline, "send", self._op)

    def recv(self, tensor: Tensor, src: int, tag: int, deadline: float) -> None:
        self._complete([self._post_recv(tensor, src, tag)], deadline, "recv", self._op)

    def batch_send_recv(
        self,
        sends: Sequence[tuple[Tensor, int, int]],
        recvs: Sequence[tuple[Tensor, int, int]],
        deadline: float,
    ) -> None:
        posted = [self._post_recv(tensor, src, tag) for tensor, src, tag in recvs]
        posted += [self._post_send(tensor, dst, tag) for tensor, dst, tag in sends]
        self._complete(posted, deadline, "batch_send_recv", self._op)
