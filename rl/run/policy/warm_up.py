"""A few supervised steps before reinforcement, so that the policy sometimes draws right answers to reward."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.functional import cross_entropy

from holdfast.rl.config.run_config import ModelConfig
from holdfast.rl.data.prompts import Problem, Tokenizer, seed_of
from holdfast.rl.generators.models import ModelSource, save_model

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
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.int64, device="cpu")
    labels = torch.full_like(tokens, IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer], device="cpu")
        labels[row, len(prompt) : end] = torch.tensor(answer, device="cpu")
    return tokens, labels
