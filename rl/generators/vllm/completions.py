"""Requests and completions between holdfast and vLLM."""

from __future__ import annotations

from typing import Any

from holdfast.rl.data.episode import Completion, Finish, SamplingRequest

_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


def sampling_parameters(request: SamplingRequest, seed: int) -> Any:
    """vLLM's parameters of one sample of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=seed,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: Any) -> Completion:
    """A completion from vLLM's, which gives versions as spans of tokens."""
    tokens = tuple(output.token_ids)
    logprobs = tuple(found[token].logprob for token, found in zip(tokens, output.logprobs or (), strict=True))
    spans = output.weight_versions or ()
    versions = tuple(int(span.version) for span in spans for _ in range(span.start, span.end))
    return Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=_FINISH[output.finish_reason])
