"""The policy: a Llama so small that a step takes milliseconds, with random initial weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from holdfast.rl.learning import task

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PARAMETERS = 84_032


def build(seed: int) -> LlamaForCausalLM:
    """A new model on the CPU in float32; its weights depend on `seed` alone. The global random state is kept."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def last_logits(model: LlamaForCausalLM, tokens: torch.Tensor, keep: int) -> torch.Tensor:
    """The logits (n, keep, vocabulary) that follow the last `keep` of the `tokens` (n, length)."""
    logits: torch.Tensor = model(input_ids=tokens, logits_to_keep=keep).logits
    return logits


def digest(model: LlamaForCausalLM) -> str:
    """32 hexadecimal digits that depend on every bit of the weights."""
    state = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        state.update(name.encode())
        state.update(tensor.numpy().tobytes())
    return state.hexdigest()
