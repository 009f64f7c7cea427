"""The kernels as torch's ops: the reference for the others, in any dtype and on any device."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.rl.kernels.loss_form import MOST_LOG_RATIO, LossForm, LossInputs

Tensor = torch.Tensor


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, *, entropies: bool
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities of `tokens` (...) under `logits` (..., vocabulary), in float32, and the entropies."""
    predicted: Any = (logits.float() / temperature).log_softmax(-1)
    chosen = predicted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen, -(predicted.exp() * predicted).sum(-1) if entropies else None


def policy_loss(logprobs: Tensor, inputs: LossInputs, form: LossForm) -> Tensor:
    """The clipped surrogate loss of sequences with the new log-probabilities `logprobs` (n, length)."""
    mask = inputs.mask
    length = mask.sum(1, keepdim=True).clamp(min=1)
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old = inputs.old
    if old is None:
        old = logprobs.detach() if form.truncation else inputs.generated
    old = old.masked_fill(~mask, 0.0)
    change = logprobs - old
    if form.sequence_ratio:
        change = _exact_sum(change).unsqueeze(1) / length
    ratio = _clamped(change).exp()
    clipped = ratio.clamp(1.0 - form.clip_low, 1.0 + form.clip_high)
    advantage = inputs.advantages.unsqueeze(1)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    if form.truncation:
        drift = old - inputs.generated.masked_fill(~mask, 0.0)
        if form.sequence_ratio:
            drift = _exact_sum(drift).unsqueeze(1) / length
        gain = _clamped(drift.detach()).exp().clamp(max=form.truncation) * gain
    gain = gain.expand_as(mask)
    if form.kl and inputs.reference is not None:
        apart = _clamped(inputs.reference.masked_fill(~mask, 0.0) - logprobs)
        gain = gain - form.kl * (apart.exp() - apart - 1.0)
    if form.entropy and inputs.entropies is not None:
        gain = gain + form.entropy * inputs.entropies.masked_fill(~mask, 0.0)
    gain = gain.masked_fill(~mask, 0.0)
    return -_exact_sum(gain / length if form.by_length else gain).sum() / form.divisor


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def _exact_sum(values: Tensor) -> Tensor:
    """The sums of rows; in double precision, so that padding does not show in a result of single precision."""
    return values.double().sum(1).to(values.dtype)
