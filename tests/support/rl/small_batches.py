"""Small models, episodes to train them on, and the configuration of their trainers."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.rl.config.run_config import Objective, RunConfig
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


def trainer_config(
    strategy: str,
    batches: int,
    *,
    objective: Objective = Objective(),  # noqa: B008  (frozen)
    updates: int = 1,
    temperature: float = 1.0,
    lora_rank: int = 0,
    checkpoint_every: int = 10,
    **trainer: object,
) -> RunConfig:
    """The configuration of trainers that train on so many batches; `trainer` are fields of its section."""
    tables = {
        "steps": batches * updates,
        "algorithm": {"updates": updates},
        "sampling": {"temperature": temperature},
        "model": {"lora_rank": lora_rank},
        "checkpoint": {"every": checkpoint_every},
        "trainer": {"strategy": strategy, "rate_warmup": 1, "rate_floor": 1.0, **trainer},
    }
    return msgspec.structs.replace(msgspec.convert(tables, RunConfig), objective=objective)


def episode(prompt: Prompt, tokens: tuple[int, ...], reward: float = 1.0, version: int = 0, **fields: Any) -> Episode:
    """An episode of tokens that the policy drew with a version, unless `fields` say otherwise."""
    many = len(tokens)
    drawn: dict[str, Any] = {"logprobs": (-0.5,) * many, "versions": (version,) * many, "mask": (True,) * many}
    return Episode(prompt=prompt, tokens=tokens, reward=reward, **drawn | {"finish": "stop"} | fields)
