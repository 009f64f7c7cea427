"""Requests that tests send to generators."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.rl.data.episode import SamplingRequest


def greedy(prompts: Sequence[tuple[int, ...]], tokens: int, stop: tuple[int, ...] = ()) -> SamplingRequest:
    """The likeliest completion of each prompt, of at most so many tokens."""
    return SamplingRequest(
        prompts=tuple(prompts),
        samples=1,
        seeds=(0,) * len(prompts),
        max_new_tokens=tokens,
        temperature=0.0,
        stop=stop,
    )
