"""Each collective with inputs that name their rank, and the results that they must have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.comms import Communicator, Recv, Send

Tensor = torch.Tensor
COLLECTIVES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single", "broadcast", "all_gather", "all_gather_single",
    "all_to_all", "all_to_all_single", "gather", "scatter", "batch_send_recv", "barrier",
)  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One op of one rank: `filled` are the tensors that have to be as `expected` after it."""

    op: str
    arguments: Sequence[Any]
    filled: Sequence[Tensor]
    expected: Sequence[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the op reads, and leaves as they are."""
        nested = [each if isinstance(each, list) else [each] for each in self.arguments]
        read = [each.tensor if isinstance(each, Send) else each for each in itertools.chain(*nested)]
        return [each for each in read if isinstance(each, Tensor) and all(each is not other for other in self.filled)]

    def run(self, comm: Communicator, **options: Any) -> None:
        getattr(comm, self.op)(*self.arguments, **options).wait()
        self.check()

    def check(self) -> None:
        assert all(map(torch.equal, self.filled, self.expected)), self.op


def collective(
    op: str, rank: int, size: int, count: int, root: int = 0, turn: int = 0, dtype: torch.dtype = torch.float32
) -> Collective:
    """An op of `count` elements a rank; another `turn` has other numbers."""

    def numbers(of: int, to: int = 0) -> Tensor:
        """What rank `of` gives to rank `to`."""
        return ((torch.arange(count, device="cpu") + turn) % 977 + 100 * of + 1000 * to).to(dtype)

    mine, everyones = numbers(rank), [numbers(of) for of in range(size)]
    given, taken = [numbers(rank, to) for to in range(size)], [numbers(of, rank) for of in range(size)]
    total, sum_of_taken = torch.stack(everyones).sum(0), torch.stack(taken).sum(0)
    outputs = [torch.zeros_like(mine) for _ in range(size)]
    output, whole, at_root = outputs[0], torch.cat(outputs), rank == root
    left, right = (rank - 1) % size, (rank + 1) % size
    return {
        "all_reduce": Collective(op, [mine], [mine], [total]),
        "reduce": Collective(op, [mine, root], [mine], [total if at_root else numbers(rank)]),
        "reduce_scatter": Collective(op, [output, given], [output], [sum_of_taken]),
        "reduce_scatter_single": Collective(op, [output, torch.cat(given)], [output], [sum_of_taken]),
        "broadcast": Collective(op, [mine, root], [mine], [everyones[root]]),
        "all_gather": Collective(op, [outputs, mine], outputs, everyones),
        "all_gather_single": Collective(op, [whole, mine], [whole], [torch.cat(everyones)]),
        "all_to_all": Collective(op, [outputs, given], outputs, taken),
        "all_to_all_single": Collective(op, [whole, torch.cat(given)], [whole], [torch.cat(taken)]),
        "gather": Collective(op, [mine, outputs if at_root else None, root], outputs if at_root else [], everyones),
        "scatter": Collective(op, [output, given if at_root else None, root], [output], [numbers(root, rank)]),
        "batch_send_recv": Collective(op, [[Send(mine, right), Recv(output, left)]], [output], [everyones[left]]),
        "barrier": Collective(op, [], [], []),
    }[op]
