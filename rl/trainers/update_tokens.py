"""The episodes of an update as tensors, and their division into shards and forwards.

The division depends on the batch and the settings alone, so a shard has the same bits whichever trainer computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.rl.algorithms.collate import TrainingTokens, collate, step_totals
from holdfast.rl.algorithms.grpo import StepTotals
from holdfast.rl.config.objective import Objective
from holdfast.rl.data.batch_columns import BatchColumns
from holdfast.rl.kernels import LossInputs


@dataclass(frozen=True, slots=True)
class UpdateTokens:
    """All episodes of an update, and the totals that the loss is divided by."""

    tokens: TrainingTokens
    totals: StepTotals

    def shard(self, shard: int, shards: int, micro_batch: int) -> list[TrainingTokens]:
        """The forwards of one of `shards` shards; every shard has equally many.

        A forward that would have no episode has one with a mask that is false everywhere.
        """
        edges = _edges(len(self.tokens.tokens), shards)
        most = max(end - begin for begin, end in edges)
        count = max(1, -(-most // micro_batch)) if micro_batch else 1
        begin, end = edges[shard]
        return [self._rows(begin + low, begin + high) for low, high in _edges(end - begin, count)]

    def _rows(self, begin: int, end: int) -> TrainingTokens:
        """Some episodes, padded to the longest of them."""
        rows = slice(begin, end) if begin < end else slice(0, 1)
        whole, inputs = self.tokens, self.tokens.inputs
        length = int(whole.attention[rows].sum(1).max())
        mask = inputs.mask[rows, : length - 1]
        return TrainingTokens(
            whole.tokens[rows, :length],
            whole.attention[rows, :length],
            LossInputs(
                mask if begin < end else torch.zeros_like(mask),
                inputs.advantages[rows],
                inputs.generated[rows, : length - 1],
            ),
        )


def updates_of(columns: BatchColumns, updates: int, objective: Objective) -> list[UpdateTokens]:
    """The updates of a batch, each with consecutive groups. There are at least as many groups as updates."""
    edges = _edges(len(columns), updates)
    parts = [columns] if updates == 1 else [columns.part(begin, end) for begin, end in edges]
    return [UpdateTokens(collate(part, objective), step_totals(part, objective)) for part in parts]


def _edges(count: int, parts: int) -> list[tuple[int, int]]:
    """The edges of `parts` consecutive parts, as even as possible."""
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
