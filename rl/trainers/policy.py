"""The policy of a trainer: the model to train, its optimizer, and the loss of one forward."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast.rl.config.run_config import ModelConfig, RunConfig, TrainerConfig
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import TrainingTokens
from holdfast.rl.grpo.loss import StepTotals, loss
from holdfast.rl.grpo.token_logprobs import token_logprobs
from holdfast.rl.trainers.adapters import add_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensor = torch.Tensor
Logits = Callable[[torch.nn.Module, Tensor, int], Tensor]
"""Returns the logits (n, kept, words) of a model after the last `kept` tokens."""


BETAS = (0.9, 0.95)
"""AdamW's, as language models are trained with."""


def build_policy(source: ModelSource, config: ModelConfig) -> PreTrainedModel:
    """The model to train, in evaluation mode: without dropout. With adapters if the configuration asks for them.

    On a GPU, torch's deterministic kernels are chosen for this process: equal gradients have equal bits then.
    """
    if torch.device(source.device).type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's first matrix product runs
        torch.use_deterministic_algorithms(True, warn_only=True)
    model = source.build()
    return add_adapters(model, config, source.seed) if config.lora_rank else model


def build_optimizer(model: torch.nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=config.rate, betas=BETAS, weight_decay=config.weight_decay)


def transformers_logits(model: torch.nn.Module, tokens: Tensor, kept: int) -> Tensor:
    """The logits (n, kept, words) after the last `kept` tokens, of one of transformers' models."""
    call: Any = model
    logits: Tensor = call(input_ids=tokens, logits_to_keep=kept, use_cache=False).logits
    return logits


class PolicyLoss:
    """The loss of forwards under the objective of a run. With a KL term, the reference is `source`."""

    def __init__(self, config: RunConfig, source: ModelSource, logits: Logits = transformers_logits) -> None:
        self._logits = logits
        self._objective, self._temperature = config.objective, config.sampling.temperature
        self._reference = source.build().requires_grad_(False) if config.objective.kl else None

    def of(self, model: torch.nn.Module, forward: TrainingTokens, totals: StepTotals) -> Tensor:
        """The share of one forward of `model` in the loss of its update."""
        inputs, objective = forward.inputs, self._objective
        if self._reference is not None:
            inputs = replace(inputs, reference=self._frozen(self._reference, forward, transformers_logits))
        wanted = objective.entropy > 0
        logprobs, entropies = predict(model, forward, self._temperature, entropies=wanted, logits_of=self._logits)
        old = forward.old_logprobs
        if old is None:  # the first update of a batch: the old policy is the new one, or the generator is taken for it
            old = logprobs.detach() if objective.truncation else inputs.generated
        inputs = replace(inputs, entropies=entropies).to(logprobs.device)
        return loss(logprobs, old.to(logprobs.device), inputs, totals, objective)

    def logprobs(self, model: torch.nn.Module, forward: TrainingTokens) -> Tensor:
        """What `of` takes for the log-probabilities of `model` now, without a gradient."""
        return self._frozen(model, forward, self._logits)

    @torch.no_grad()
    def _frozen(self, model: torch.nn.Module, forward: TrainingTokens, logits: Logits) -> Tensor:
        return predict(model, forward, self._temperature, entropies=False, logits_of=logits)[0]


def predict(
    model: torch.nn.Module,
    forward: TrainingTokens,
    temperature: float,
    *,
    entropies: bool,
    logits_of: Logits = transformers_logits,
) -> tuple[Tensor, Tensor | None]:
    """The log-probs (n, length - 1) of the tokens, in float32, and the entropies where each was drawn.

    Both are 0 in the columns before the first token that counts in any row.
    """
    mask = forward.inputs.mask
    counted = mask.any(0).nonzero()
    before = int(counted[0]) if len(counted) else mask.shape[1] - 1
    device = next(model.parameters()).device
    tokens = forward.tokens.to(device)
    logits = logits_of(model, tokens[:, :-1], mask.shape[1] - before)
    chosen, entropy = token_logprobs(logits, tokens[:, before + 1 :], temperature, entropies=entropies)
    padding = torch.zeros(len(mask), before, device=device)
    return torch.cat([padding, chosen], 1), None if entropy is None else torch.cat([padding, entropy], 1)
