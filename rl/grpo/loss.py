"""The loss of GRPO, Dr. GRPO, DAPO and GSPO, in one function that reads as their formulas do.

Papers: GRPO arXiv:2402.03300 (with the k3 estimator of the KL), Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071;
truncated importance sampling between generator and trainer: Yao et al. 2025, with IMPALA's cap (1802.01561).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from holdfast.rl.config.run_config import Objective

Tensor = torch.Tensor

MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size, as verl does, so that no exponential overflows: e^20 is 485 million.

It holds for each of the three: the new policy to the old one, the old one to the generator, the reference to the new
one. A log-ratio beyond it has no gradient.
"""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Sequences of a step, padded to (n, length). `mask` is true for the tokens that count.

    What stands elsewhere is ignored.

    `advantages` (n,); `generated` are the generator's log-probabilities, `reference` those of the policy to stay near
    (for the KL term), `entropies` those of the new policy (for the bonus). `totals` are the numbers of sequences and
    of tokens that count of all units of the step together.
    """

    mask: Tensor
    advantages: Tensor
    generated: Tensor
    totals: tuple[int, int]
    reference: Tensor | None = None
    entropies: Tensor | None = None

    def to(self, device: torch.device) -> LossInputs:
        """The same on `device`."""
        given: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        moved: dict[str, Any] = {name: each.to(device) for name, each in given.items() if isinstance(each, Tensor)}
        return replace(self, **moved)


def loss(logprobs: Tensor, old_logprobs: Tensor, inputs: LossInputs, objective: Objective) -> Tensor:
    """The share of these sequences in a step's loss: losses of units, and their gradients, add up.

    `logprobs` (n, length) are the new policy's, `old_logprobs` those of the policy before the first update with these
    sequences: at that update, the new policy's own without a gradient.
    """
    mask, advantage = inputs.mask, inputs.advantages.unsqueeze(1)
    length = mask.sum(1, keepdim=True).clamp(min=1)
    new, old, generated = (each.masked_fill(~mask, 0.0) for each in (logprobs, old_logprobs, inputs.generated))

    # The importance ratio of each token, pi_new / pi_old; GSPO's of a whole sequence is their geometric mean.
    log_ratio = new - old
    if objective.ratio == "sequence":
        log_ratio = _row_sums(log_ratio).unsqueeze(1) / length
    ratio = _clamped(log_ratio).exp()

    # PPO's pessimistic bound: no gain from a ratio outside of the clip.
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)

    # The generator's policy is not quite the trainer's old one: weigh by pi_old / pi_generator, capped.
    if objective.truncation:
        log_drift = old - generated
        if objective.ratio == "sequence":
            log_drift = _row_sums(log_drift).unsqueeze(1) / length
        gain = _clamped(log_drift.detach()).exp().clamp(max=objective.truncation) * gain
    gain = gain.expand_as(mask)

    # The distance to the reference policy, by the estimator k3: r - log r - 1 with r = pi_reference / pi_new.
    if objective.kl and inputs.reference is not None:
        log_r = _clamped(inputs.reference.masked_fill(~mask, 0.0) - new)
        gain = gain - objective.kl * (log_r.exp() - log_r - 1.0)
    if objective.entropy and inputs.entropies is not None:
        gain = gain + objective.entropy * inputs.entropies.masked_fill(~mask, 0.0)

    # GRPO and GSPO average over the tokens of a sequence, then over sequences; DAPO over all tokens of the step;
    # Dr. GRPO adds the tokens of a sequence, and averages over sequences.
    gain = gain.masked_fill(~mask, 0.0)
    per_sequence = _row_sums(gain / length if objective.aggregate == "sequence" else gain)
    sequences, tokens = inputs.totals
    return -per_sequence.sum() / (tokens if objective.aggregate == "token" else sequences)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def _row_sums(values: Tensor) -> Tensor:
    """The sums of rows; in double precision, so that padding does not show in a result of single precision."""
    return values.double().sum(1).to(values.dtype)
