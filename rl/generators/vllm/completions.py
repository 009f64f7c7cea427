"""Requests and completions between holdfast and vLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.rl.data.episode import Completion, Finish, SamplingRequest
from holdfast.rl.data.prompts import seed_of

CUT_OFF = "abort"
"""What vLLM says of a sample that was cut off; the others are "stop" and "length"."""

Draw = Callable[[tuple[int, ...], int, int], Awaitable[Any]]
"""Draws a sample after a prompt, from a seed, of at most so many tokens; returns vLLM's output."""


def sampling_parameters(request: SamplingRequest, seed: int, most: int) -> Any:
    """vLLM's parameters of one sample of a request, of at most `most` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=seed,
        max_tokens=most,
        stop_token_ids=list(request.stop),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def draw_whole(draw: Draw, prompt: tuple[int, ...], seed: int, most: int) -> Completion:
    """One sample of at most `most` tokens, to its end.

    A part that an update of the weights cut off goes on behind its tokens, with the new weights.
    """
    tokens, logprobs, versions = (), (), ()  # type: tuple[int, ...], tuple[float, ...], tuple[int, ...]
    while True:
        part = await draw(
            (*prompt, *tokens), seed_of("go on", seed, len(tokens)) if tokens else seed, most - len(tokens)
        )
        drawn = tuple(part.token_ids)
        logprobs += tuple(found[token].logprob for token, found in zip(drawn, part.logprobs or (), strict=True))
        versions += tuple(int(each.version) for each in part.weight_versions or () for _ in range(each.start, each.end))
        tokens += drawn
        finish: Finish = "stop" if part.finish_reason == "stop" else "length"
        if part.finish_reason != CUT_OFF or len(tokens) == most:
            return Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=finish)
