"""Low-rank adapters (LoRA) of `peft`: alone trained, and merged into the weights that are published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from holdfast.rl.config.run_config import ModelConfig
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.generators.models import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
