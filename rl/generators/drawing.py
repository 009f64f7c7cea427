"""Draws tokens from logits. What a sample draws depends on its own seed and logits alone.

The log-probs are those of the distribution at the request's temperature, before `top_p` cuts its tail off. A trainer
computes log-probs of the same distribution, as in TRL; so a token's ratio is 1 under the weights that drew it. At
temperature 0 the likeliest token is taken, and its log-prob is that at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """The random numbers of samples, float64 (samples, count) in [0, 1): those of a row depend on its seed alone."""
    found = torch.empty(len(seeds), count, dtype=torch.float64, device="cpu")
    random = torch.Generator("cpu")
    for row, seed in zip(found, seeds, strict=True):
        random.manual_seed(seed)
        torch.rand(count, dtype=torch.float64, generator=random, out=row, device="cpu")
    return found


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row of `logits` (rows, vocabulary); returns tokens and their log-probs, each (rows,).

    `temperature`, `top_p` and `uniform` are (rows,).
    """
    greedy = temperature == 0.0
    scale = torch.where(greedy, 1.0, temperature).unsqueeze(1)
    logprobs = (logits.float() / scale).log_softmax(-1)
    tokens = _inverted(_nucleus(logprobs.exp(), top_p), uniform)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverted(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds `uniform` of the total."""
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform * total, below)
    return torch.searchsorted(cumulative, threshold.unsqueeze(1), right=True).squeeze(1)


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Set those tokens to 0 that are not among the likeliest ones which together reach `top_p`."""
    if bool((top_p >= 1.0).all()):
        return probabilities
    ordered, order = probabilities.sort(stable=True, dim=-1, descending=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    ordered = ordered.masked_fill((before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)
