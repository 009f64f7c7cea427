"""One unit of generation: a pure function of (seed, step, unit) and the weights, on any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from holdfast.rl.learning import model, task
from holdfast.rl.learning.recipe import Recipe, seed_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a unit: n = prompts x group, those of one prompt side by side.

    `prompts` (n, 6) and `tokens` (n, 2) int64; `logprobs` (n, 2) float32 of the tokens under the weights that
    generated them; `rewards` (n,) float32.
    """

    prompts: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor


def _nothing() -> None:
    pass


@torch.no_grad()
def generate(
    policy: LlamaForCausalLM, recipe: Recipe, step: int, unit: int, between: Callable[[], None] = _nothing
) -> Samples:
    """Sample the unit's answers at temperature 1. `between` is called once the first token of each is drawn."""
    random = torch.Generator().manual_seed(seed_of("unit", recipe.seed, step, unit))
    problems = task.training()
    chosen = torch.randint(len(problems), (recipe.prompts,), generator=random, device="cpu")
    prompts = problems.prompts[chosen]
    first = model.last_logits(policy, prompts, 1)[:, 0].log_softmax(-1).repeat_interleave(recipe.group, 0)
    prompts = prompts.repeat_interleave(recipe.group, 0)
    tokens = torch.multinomial(first.exp(), 1, generator=random)
    between()
    second = model.last_logits(policy, torch.cat([prompts, tokens], 1), 1)[:, 0].log_softmax(-1)
    tokens = torch.cat([tokens, torch.multinomial(second.exp(), 1, generator=random)], 1)
    logprobs = torch.stack([first, second], 1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    answers = problems.answers[chosen].repeat_interleave(recipe.group, 0)
    return Samples(prompts, tokens, logprobs, task.reward(tokens, answers))


@torch.no_grad()
def greedy(policy: LlamaForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """The most likely answers (n, 2) to `prompts` (n, 6)."""
    tokens = prompts
    for _ in range(task.ANSWER_TOKENS):
        following = model.last_logits(policy, tokens, 1)[:, 0].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return tokens[:, task.PROMPT_TOKENS :]


def exact_match(policy: LlamaForCausalLM) -> float:
    """The share of the held-out problems that greedy decoding answers exactly."""
    problems = task.held_out()
    return float(task.reward(greedy(policy, problems.prompts), problems.answers).mean())
