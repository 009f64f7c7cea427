"""What a policy loss is computed of (`LossInputs`), and how (`LossForm`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size, as verl does, so that no exponential overflows: e^20 is 485 million.

It holds for each of the three: the new policy to the old one, the old one to the generator, the reference to the new
one. A log-ratio beyond it has no gradient.
"""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Sequences padded to (n, length). `mask` is true for the tokens that count; what stands elsewhere is ignored.

    `advantages` (n,); `generated` are the generator's log-probabilities, `old` the trainer's before the first update
    with these sequences, `reference` those of the policy to stay near (for `kl`); `entropies` are of the new policy.
    Without `old`, the old policy is the new one, as at the first update with them; or the generator's, without
    `truncation`.
    """

    mask: torch.Tensor
    advantages: torch.Tensor
    generated: torch.Tensor
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    entropies: torch.Tensor | None = None

    def to(self, device: torch.device) -> LossInputs:
        """The same on `device`."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return replace(self, **{name: tensor.to(device) for name, tensor in given if tensor is not None})


@dataclass(frozen=True, slots=True)
class LossForm:
    """The formula: importance ratios of whole sequences or of tokens, clipped to [1 - clip_low, 1 + clip_high].

    `kl` weighs the distance to the reference (k3), `entropy` the bonus; `truncation` caps the importance weight of the
    old policy against the generator (0: none). Each sequence's sum over its tokens is divided by their number with
    `by_length`; the sum of all sequences is divided by `divisor`.
    """

    sequence_ratio: bool
    clip_low: float
    clip_high: float
    kl: float
    entropy: float
    truncation: float
    by_length: bool
    divisor: int
