"""Group-relative policy optimisation (GRPO): advantages within the samples of a prompt, a clipped loss, one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_

from holdfast.rl.learning import model
from holdfast.rl.learning.generate import Samples
from holdfast.rl.learning.recipe import Recipe

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards (n,) minus their group's mean, over its standard deviation; 0 where a whole group is alike."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, correction=0, keepdim=True) + 1e-4)).view(-1)


def loss(policy: LlamaForCausalLM, samples: Samples, recipe: Recipe) -> torch.Tensor:
    """The clipped surrogate, minus the entropy bonus, summed over the samples and divided by those of a step.

    So the losses (and gradients) of a step's units add up to those of the step.
    """
    inputs = torch.cat([samples.prompts, samples.tokens[:, :-1]], 1)
    predicted = model.last_logits(policy, inputs, samples.tokens.shape[1]).log_softmax(-1)
    logprobs = predicted.gather(2, samples.tokens.unsqueeze(2)).squeeze(2)
    ratio = (logprobs - samples.logprobs).exp()
    advantage = advantages(samples.rewards, recipe.group).unsqueeze(1)
    clipped = ratio.clamp(1.0 - recipe.clip, 1.0 + recipe.clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    entropy = -(predicted.exp() * predicted).sum(-1)
    return -(gain + recipe.entropy * entropy).mean(1).sum() / recipe.step_samples


def gradient(policy: LlamaForCausalLM, samples: Samples, recipe: Recipe) -> torch.Tensor:
    """The gradient of the loss of one unit's samples: flat, in the order of the parameters. Shape (parameters,)."""
    parameters = list(policy.parameters())
    gradients = torch.autograd.grad(loss(policy, samples, recipe), parameters)
    return torch.cat([each.reshape(-1) for each in gradients])


def optimizer(policy: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over all parameters; `update` sets its learning rate."""
    return torch.optim.AdamW(policy.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def update(
    policy: LlamaForCausalLM, optim: torch.optim.Optimizer, gradient: torch.Tensor, recipe: Recipe, step: int
) -> float:
    """Clip the flat `gradient` and take the optimizer's step at `step`'s learning rate; returns the norm before."""
    at = 0
    for parameter in policy.parameters():
        parameter.grad = gradient[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()
    norm = clip_grad_norm_(policy.parameters(), recipe.max_norm)
    for parameters in optim.param_groups:
        parameters["lr"] = recipe.learning_rate(step)
    optim.step()
    optim.zero_grad(set_to_none=True)
    return float(norm)
