"""What a configuration trains: the policy, its tokenizer and its problems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data import arithmetic
from holdfast.rl.data.prompts import Problem, PromptSource, TextTokenizer, Tokenizer, hold_out, read_problems, seed_of
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.trainers.adapters import check_adapters

SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": arithmetic.CharacterTokenizer.vocabulary,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
"""A Llama of 84,032 parameters, for the arithmetic task."""

SMALL_TEXT_LLAMA = {**SMALL_LLAMA, "vocab_size": TextTokenizer.vocabulary, "max_position_embeddings": 512}
"""The same for the texts of environments: 94,528 parameters."""


@dataclass(frozen=True, slots=True)
class Task:
    """The prompts to train on and to evaluate with, and the tokenizer of both."""

    train: PromptSource
    held_out: PromptSource | None
    problems: tuple[Problem, ...]
    tokenizer: Tokenizer


class PretrainedTokenizer:
    """The tokenizer in a model's folder. Raises `ModelMisfit`."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        make: Any = AutoTokenizer
        try:
            self._tokenizer: Any = make.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            why = f"its folder has no tokenizer: {type(error).__name__}: {str(error).splitlines()[0]}"
            raise ModelMisfit(repr(str(path)), why, "save the model's own tokenizer beside it") from error
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Text to token numbers."""
        found: list[int] = self._tokenizer.encode(text)
        return found

    def decode(self, tokens: Any) -> str:
        """Token numbers to text."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def policy_source(config: RunConfig) -> ModelSource:
    """The policy before any training."""
    model = config.model
    if not model.path:
        small = SMALL_LLAMA if config.has_prompts else SMALL_TEXT_LLAMA
        return ModelSource(config=small, seed=config.seed, dtype=model.dtype, device=model.device)
    path = Path(model.path)
    words = PretrainedTokenizer(path).vocabulary
    return ModelSource(path=str(path), dtype=model.dtype, device=model.device, vocabulary=words)


def check_policy(config: RunConfig, source: ModelSource) -> None:
    """Raise `ModelMisfit` if the policy has not the tokens or the layers that the configuration names."""
    size = getattr(source.read_config(), "vocab_size", None)
    if isinstance(size, int) and (unknown := [token for token in config.sampling.stop if token >= size]):
        why = f"sampling.stop has the token {unknown[0]}, and its tokens are 0 to {size - 1}"
        raise ModelMisfit(source.name, why, "name the tokens that end its texts")
    if config.model.lora_rank:
        check_adapters(source, config.model)


def task_of(config: RunConfig) -> Task:
    """The task of a configuration. Raises `BadDataset`."""
    data = config.data
    if data.task == "arithmetic":
        problems, held_out, names = arithmetic.training(), arithmetic.held_out(), ("arithmetic", "arithmetic")
    else:
        problems = read_problems(Path(data.train))
        held_out = read_problems(Path(data.held_out)) if data.held_out else ()
        if data.held_out_share:
            problems, held_out = hold_out(problems, data.held_out_share, data.train)
        names = (data.train, data.held_out or data.train)
    tokenizer = tokenizer_of(config)
    return Task(
        PromptSource(problems, tokenizer, seed_of("data", config.seed), names[0]),
        PromptSource(held_out, tokenizer, seed_of("held out", config.seed), names[1]) if held_out else None,
        problems,
        tokenizer,
    )


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of a configuration's policy."""
    if config.model.path:
        return PretrainedTokenizer(Path(config.model.path))
    return arithmetic.CharacterTokenizer() if config.has_prompts else TextTokenizer()
