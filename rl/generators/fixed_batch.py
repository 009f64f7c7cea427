"""Fixed mode: one request is one static batch, a pure function of the request and the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from holdfast.rl.data.episode import Completion, SamplingRequest
from holdfast.rl.generators.drawing import draw, uniforms
from holdfast.rl.generators.slot_cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensor = torch.Tensor


def prefill(model: PreTrainedModel, prompts: list[tuple[int, ...]]) -> tuple[SlotCache, Tensor, int]:
    """Run prompts through the model: their cache, the logits (prompts, vocabulary) after each, the longest's length."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    cache = SlotCache(len(prompts), longest)
    device = model.device
    tokens = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device=device)
    columns = sorted({length - 1 for length in lengths})
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    if len(columns) == 1:
        return cache, cache.forward(model, tokens, positions, 0)[:, -1], longest
    logits = cache.forward(model, tokens, positions, 0, torch.tensor(columns, device=device))
    chosen = torch.tensor([columns.index(length - 1) for length in lengths], device=device)
    return cache, logits[torch.arange(len(prompts), device=device), chosen], longest


@torch.no_grad()
def generate_batch(
    model: PreTrainedModel, version: int, request: SamplingRequest, between: Callable[[], None]
) -> list[Completion]:
    """The completions of a request, those of one prompt side by side. `between` is called before each later token."""
    prompts, samples, device = list(request.prompts), request.samples, model.device
    rows = len(prompts) * samples
    cache, logits, longest = prefill(model, prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device).repeat_interleave(samples)
    alike = int(lengths.min()) == longest
    origin = torch.arange(len(prompts), device=device).repeat_interleave(samples)
    logits = logits[origin]
    temperature = torch.full((rows,), request.temperature, device=device)
    top_p = torch.full((rows,), request.top_p, device=device)
    random = uniforms(request.seeds, request.max_new_tokens).to(device)
    stop = torch.tensor(request.stop, dtype=torch.int64, device=device)
    tokens = torch.zeros(rows, request.max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(rows, request.max_new_tokens, device=device)
    counts = torch.full((rows,), request.max_new_tokens, device=device)
    stopped = torch.zeros(rows, dtype=torch.bool, device=device)
    running = SlotCache(rows, longest + request.max_new_tokens - 1)
    for step in range(request.max_new_tokens):
        if step == 1:
            running.copy_from(cache, origin, 0, longest)
        if step:
            between()
            at = (lengths + step - 1).unsqueeze(1)
            logits = running.forward(model, tokens[:, step - 1 : step], at, longest + step - 1 if alike else None)[:, 0]
        tokens[:, step], logprobs[:, step] = draw(logits, temperature, top_p, random[:, step])
        if len(stop):
            ends = torch.isin(tokens[:, step], stop) & ~stopped
            counts[ends] = step + 1
            stopped |= ends
            if bool(stopped.all()):
                break
    return [
        Completion(
            tokens=tuple(drawn[:count]),
            logprobs=tuple(found[:count]),
            versions=(version,) * count,
            finish="stop" if ended else "length",
        )
        for drawn, found, count, ended in zip(
            tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist(), strict=True
        )
    ]
