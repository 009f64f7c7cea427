"""The episodes of a batch as padded tensors for a trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.rl.algorithms.grpo import StepTotals, advantages
from holdfast.rl.config.objective import Objective
from holdfast.rl.data.batch_columns import BatchColumns
from holdfast.rl.kernels import LossInputs


@dataclass(frozen=True, slots=True)
class TrainingTokens:
    """Episodes padded on the right, a row each: `tokens` (n, length) with their prompts, and `attention` (n, length).

    Column c of `inputs` and of log-probabilities belongs to the token in column c + 1: they have one column less.
    """

    tokens: torch.Tensor
    attention: torch.Tensor
    inputs: LossInputs


def collate(columns: BatchColumns, objective: Objective) -> TrainingTokens:
    """The episodes of a batch as tensors on the CPU."""
    prompts, drawn = columns.tensor("prompts"), columns.tensor("drawn")
    begins, ends = prompts.unsqueeze(1), (prompts + drawn).unsqueeze(1)
    column = torch.arange(int(ends.max()), device="cpu").expand(len(prompts), -1)
    attention = column < ends
    after = (column[:, :-1] >= begins - 1) & (column[:, :-1] < ends - 1)
    weights = advantages(columns.rewards_by_group(), objective)
    return TrainingTokens(
        _placed(columns.tensor("tokens"), attention),
        attention,
        LossInputs(
            _placed(counted_tokens(columns, objective), after),
            torch.tensor(weights, dtype=torch.float32, device="cpu"),
            _placed(columns.tensor("logprobs"), after),
        ),
    )


def step_totals(tokens: TrainingTokens) -> StepTotals:
    """The totals of all episodes of an update, whichever unit each is in."""
    mask = tokens.inputs.mask
    return StepTotals(sequences=len(mask), tokens=max(int(mask.sum()), 1))


def counted_tokens(columns: BatchColumns, objective: Objective) -> torch.Tensor:
    """Which of the tokens after the prompts count in the loss."""
    mask = columns.tensor("mask")
    if objective.skip_overlong:
        mask &= ~columns.tensor("overlong").repeat_interleave(columns.tensor("drawn"))
    return mask


def _placed(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The values in the places that are true, row by row; 0 in the others."""
    found = torch.zeros(places.shape, dtype=values.dtype, device="cpu")
    found[places] = values
    return found
