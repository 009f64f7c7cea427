"""The policy of a trainer: its model, adapters (LoRA of `peft`), optimizer, and the loss of one forward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from holdfast.rl.config.run_config import ModelConfig, RunConfig, TrainerConfig
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.grpo.batch import TrainingTokens
from holdfast.rl.grpo.loss import loss
from holdfast.rl.grpo.token_logprobs import token_logprobs

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

    def of(self, model: torch.nn.Module, forward: TrainingTokens) -> Tensor:
        """The share of one forward of `model` in the loss of its update."""
        inputs, objective = forward.inputs, self._objective
        if self._reference is not None:
            inputs = replace(inputs, reference=self._frozen(self._reference, forward, transformers_logits))
        logprobs, entropies = self._predict(model, forward, self._logits, entropies=objective.entropy > 0)
        old = forward.old_logprobs
        if old is None:  # the first update of a batch: the old policy is the new one, or the generator is taken for it
            old = logprobs.detach() if objective.truncation else inputs.generated
        inputs = replace(inputs, entropies=entropies).to(logprobs.device)
        return loss(logprobs, old.to(logprobs.device), inputs, objective)

    def logprobs(self, model: torch.nn.Module, forward: TrainingTokens) -> Tensor:
        """What `of` takes for the log-probabilities of `model` now, without a gradient."""
        return self._frozen(model, forward, self._logits)

    @torch.no_grad()
    def _frozen(self, model: torch.nn.Module, forward: TrainingTokens, logits: Logits) -> Tensor:
        return self._predict(model, forward, logits, entropies=False)[0]

    def _predict(
        self, model: torch.nn.Module, forward: TrainingTokens, logits: Logits, *, entropies: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The log-probs (n, length - 1) of the tokens, in float32, and the entropies where each was drawn.

        Both are 0 in the columns before the first token that counts in any row.
        """
        mask = forward.inputs.mask
        counted = mask.any(0).nonzero()
        before = int(counted[0]) if len(counted) else mask.shape[1] - 1
        device = next(model.parameters()).device
        tokens = forward.tokens.to(device)
        found = logits(model, tokens[:, :-1], mask.shape[1] - before)
        chosen, entropy = token_logprobs(found, tokens[:, before + 1 :], self._temperature, entropies=entropies)
        padding = torch.zeros(len(mask), before, device=device)
        return torch.cat([padding, chosen], 1), None if entropy is None else torch.cat([padding, entropy], 1)


PREFIX = "base_model.model."
"""What peft puts before the names of a model's tensors."""


def add_adapters(model: PreTrainedModel, adapters: ModelConfig, seed: int) -> PreTrainedModel:
    """`model` with adapters, which alone have gradients. Their first weights depend on `seed`. Raises `ModelMisfit`."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelMisfit(type(model).__name__, str(error), "pip install 'holdfast[lora]'") from error
    make: Any = LoraConfig
    config = make(
        r=adapters.lora_rank,
        lora_alpha=adapters.lora_alpha,
        target_modules=list(adapters.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    wrap: Any = get_peft_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            wrapped: PreTrainedModel = wrap(model, config).eval()
        except ValueError as error:
            raise ModelMisfit(type(model).__name__, str(error), "name its linear layers in `lora_targets`") from error
    return wrapped


def check_adapters(source: ModelSource, adapters: ModelConfig) -> None:
    """Raise `ModelMisfit` if a model cannot have these adapters. None of its weights are read or made."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM
    with torch.device("meta"):
        add_adapters(make.from_config(source.read_config()), adapters, 0)


def merged(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict of the model without adapters, each layer's merged into its weight; changes nothing.

    Of a sharded model it is this rank's shards; then collective.
    """
    layers = {f"{name}.base_layer.weight": module for name, module in _adapted(model)}
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            found[plain] = _with_adapter(layers[name], tensor) if name in layers else tensor
    return found


def _adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


@torch.no_grad()
def _with_adapter(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """The merged weight. Every rank multiplies the whole adapter, so its bits do not depend on the sharding."""
    [name] = module.active_adapters
    first, second = (_whole(each[name].weight.detach()) for each in (module.lora_A, module.lora_B))
    added = (second @ first) * module.scaling[name]
    if module.fan_in_fan_out:
        added = added.T.contiguous()
    placed: Any = weight
    if hasattr(placed, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        added = distribute_tensor(added, placed.device_mesh, placed.placements, src_data_rank=None)
    result: torch.Tensor = placed + added
    return result


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found
