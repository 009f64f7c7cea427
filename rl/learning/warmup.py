"""A few supervised steps before reinforcement, so that the policy sometimes draws right answers to reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from holdfast.rl.learning import model, task
from holdfast.rl.learning.recipe import Recipe, seed_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def warm_up(policy: LlamaForCausalLM, recipe: Recipe) -> float:
    """Take `recipe.warmup_steps` cross-entropy steps on training problems, in place; returns the last loss in nats.

    Deterministic: every process that calls it on the same weights ends with the same bits. It has an optimizer of its
    own, so reinforcement starts with a fresh one.
    """
    random = torch.Generator().manual_seed(seed_of("warmup", recipe.seed))
    optim = torch.optim.AdamW(policy.parameters(), lr=recipe.warmup_rate, betas=(0.9, 0.95), weight_decay=0.0)
    problems = task.training()
    last = 0.0
    for _ in range(recipe.warmup_steps):
        chosen = torch.randint(len(problems), (recipe.warmup_batch,), generator=random, device="cpu")
        answers = problems.answers[chosen]
        inputs = torch.cat([problems.prompts[chosen], answers[:, :-1]], 1)
        logits = model.last_logits(policy, inputs, task.ANSWER_TOKENS)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
        optim.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optim.step()
        last = float(loss.detach())
    return last
