"""Small models, and episodes to train them on."""

from __future__ import annotations

from typing import Any

from holdfast.rl.data.episode import Episode, Prompt
from holdfast.rl.generators.models import ModelSource


def tiny_llama(words: int, layers: int = 1, positions: int = 32, width: int = 16) -> ModelSource:
    """A model with random weights that knows so many tokens."""
    return ModelSource(
        config={
            "model_type": "llama",
            "vocab_size": words,
            "hidden_size": width,
            "intermediate_size": width * 3 // 2,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "max_position_embeddings": positions,
        }
    )


def episode(prompt: Prompt, tokens: tuple[int, ...], reward: float = 1.0, version: int = 0, **fields: Any) -> Episode:
    """An episode of tokens that the policy drew with a version, unless `fields` say otherwise."""
    many = len(tokens)
    drawn: dict[str, Any] = {"logprobs": (-0.5,) * many, "versions": (version,) * many, "mask": (True,) * many}
    return Episode(prompt=prompt, tokens=tokens, reward=reward, **drawn | {"finish": "stop"} | fields)
