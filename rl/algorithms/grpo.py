"""Group-relative policy optimisation: advantages and the losses of GRPO, Dr. GRPO, DAPO and GSPO.

Papers: GRPO arXiv:2402.03300 (k3 estimator of the KL included), Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071.
Truncated importance sampling between generator and trainer: Yao et al. 2025, with IMPALA's cap (1802.01561).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.rl.config.objective import Objective
from holdfast.rl.kernels import LossForm, LossInputs, policy_loss


@dataclass(frozen=True, slots=True)
class StepTotals:
    """How many sequences, and tokens that count, all units of a step have together."""

    sequences: int
    tokens: int


def advantages(rewards: Sequence[float], objective: Objective) -> tuple[float, ...]:
    """The advantages of the episodes of one group; exact sums, so their order changes no bit."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not objective.normalise or max(rewards) == min(rewards):
        return tuple(centred) if max(rewards) > min(rewards) else (0.0,) * len(rewards)
    scale = math.sqrt(math.fsum(each * each for each in centred) / len(rewards)) + 1e-4
    return tuple(each / scale for each in centred)


def loss(logprobs: torch.Tensor, inputs: LossInputs, totals: StepTotals, objective: Objective) -> torch.Tensor:
    """The share of these sequences in a step's loss: losses of units, and their gradients, add up.

    `logprobs` (n, length) are the new policy's.
    """
    form = LossForm(
        sequence_ratio=objective.ratio == "sequence",
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        kl=objective.kl,
        entropy=objective.entropy,
        truncation=objective.truncation,
        by_length=objective.aggregate == "sequence",
        divisor=totals.tokens if objective.aggregate == "token" else totals.sequences,
    )
    return policy_loss(logprobs, inputs, form)
