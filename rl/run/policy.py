"""What a configuration trains: the policy, its tokenizer and problems, and its supervised steps before the first one.

The driver does not import transformers: forks of the zygote read, build and warm up the policy.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch.nn.functional import cross_entropy

from holdfast.ft.processes.zygote_client import call_in_fork
from holdfast.rl.config.run_config import ModelConfig, RunConfig
from holdfast.rl.data.prompts import (
    ARITHMETIC_CHARACTERS,
    PRINTABLE_CHARACTERS,
    CharacterTokenizer,
    Problem,
    PromptSource,
    Tokenizer,
    arithmetic_held_out,
    arithmetic_training,
    read_problems,
    seed_of,
)
from holdfast.rl.generators.models import ModelMisfit, ModelSource, save_model
from holdfast.rl.trainers.policy import check_adapters

SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": len(ARITHMETIC_CHARACTERS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
"""A Llama of 84,032 parameters, for the arithmetic task."""

SMALL_TEXT_LLAMA = {**SMALL_LLAMA, "vocab_size": len(PRINTABLE_CHARACTERS), "max_position_embeddings": 512}
"""The same for the texts of environments: 94,528 parameters."""


@dataclass(frozen=True, slots=True)
class Task:
    """The prompts to train on and to evaluate with, and the tokenizer of both."""

    train: PromptSource
    held_out: PromptSource | None
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
        problems, held_out, names = arithmetic_training(), arithmetic_held_out(), ("arithmetic", "arithmetic")
    else:
        problems = read_problems(Path(data.train))
        held_out = read_problems(Path(data.held_out)) if data.held_out else ()
        names = (data.train, data.held_out)
    tokenizer = tokenizer_of(config)
    return Task(
        PromptSource(problems, tokenizer, seed_of("data", config.seed), names[0]),
        PromptSource(held_out, tokenizer, seed_of("held out", config.seed), names[1]) if held_out else None,
        tokenizer,
    )


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of a configuration's policy."""
    if config.model.path:
        return PretrainedTokenizer(Path(config.model.path))
    return CharacterTokenizer() if config.has_prompts else CharacterTokenizer(PRINTABLE_CHARACTERS, unknown="?")


# -- in a process of its own

T = TypeVar("T")

LIMIT_SECONDS = 3600.0
"""The most seconds for the supervised steps of a policy."""

MODEL_CODE = ("transformers.models.llama.modeling_llama",)
"""What these processes share one import of."""


async def in_policy_process(what: str, function: Callable[[], T], folder: Path) -> T:
    """What `function` returns, or raises, in a process of its own. The output of that process goes beside `folder`."""
    output = folder.with_suffix(".log")
    call = partial(call_in_fork, function, name=what, output=output, timeout=LIMIT_SECONDS, preload=MODEL_CODE)
    return await asyncio.to_thread(call)


# -- supervised steps, so that the policy sometimes draws right answers to reward

IGNORED = -100
"""The label of tokens that do not count, as torch has it."""


def warmed_up(source: ModelSource, config: ModelConfig, folder: Path) -> ModelSource:
    """The policy that `warm_up` saves in `folder`; `source` itself if no step is asked for."""
    if not config.warmup_steps:
        return source
    return ModelSource(path=str(folder), dtype=source.dtype, device=source.device, vocabulary=source.vocabulary)


def warm_up(
    source: ModelSource, config: ModelConfig, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int, folder: Path
) -> None:
    """Save `source` in `folder` after supervised steps on `problems`. The weights depend on the arguments alone.

    They are trained on the CPU whatever the device of `source` is.
    """
    model = msgspec.structs.replace(source, device="cpu").build()
    train(model, config, problems, tokenizer, seed)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    save_model(model, part)
    part.rename(folder)


def train(model: Any, config: ModelConfig, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int) -> float:
    """Take the supervised steps on the answers of `problems`, in place; returns the last loss in nats."""
    dice = random.Random(seed_of("warmup", seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warmup_rate, betas=(0.9, 0.95), weight_decay=0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    last = 0.0
    try:
        for _ in range(config.warmup_steps):
            tokens, labels = _rows(dice.choices(problems, k=config.warmup_batch), tokenizer)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            last = float(loss.detach())
    finally:
        torch.set_num_threads(threads)
    return last


def _rows(problems: Sequence[Problem], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens padded on the right, and labels that leave out prompts and padding."""
    pairs = [(tokenizer.encode(each.prompt), tokenizer.encode(each.answer)) for each in problems]
    tokens = [torch.tensor([*prompt, *answer], device="cpu") for prompt, answer in pairs]
    labels = [torch.tensor([*[IGNORED] * len(prompt), *answer], device="cpu") for prompt, answer in pairs]
    padded = torch.nn.utils.rnn.pad_sequence
    return padded(tokens, batch_first=True), padded(labels, batch_first=True, padding_value=IGNORED)
