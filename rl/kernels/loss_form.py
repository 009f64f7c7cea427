"""What a policy loss is computed of (`LossInputs`), and how (`LossForm`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Sequences padded to (n, length). `mask` is true for the tokens that count; what stands elsewhere is ignored.

    `advantages` (n,); `generated` are the generator's log-probabilities, `old` the trainer's before the first update
    with these sequences, `reference` those of the policy to stay near (for `kl`); `entropies` are of the new policy.
    Without `old`, this is the first update with them: the old policy is the new one, or the generator's.
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
