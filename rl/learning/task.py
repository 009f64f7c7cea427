"""The task: sums of three digits, `7+8+5=` -> `20`, with an exact reward.

There are 1,000 prompts. The 204 held-out ones are never trained on, nor is any reordering of them (`8+7+5=` is held
out with `7+8+5=`): the split is by multiset, the same for every seed. An answer has exactly two characters.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

import torch

CHARACTERS = "0123456789+= \n"
VOCABULARY = len(CHARACTERS)
PROMPT_TOKENS = 6
ANSWER_TOKENS = 2
_SPLIT_SEED = 20
_HELD_OUT = {3: 24, 2: 19, 1: 3}
"""Held-out multisets by their number of distinct digits: a fifth of each kind, and 204 prompts in all."""


def encode(text: str) -> list[int]:
    """Characters to token numbers; ValueError for a character that is not in the vocabulary."""
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """Token numbers to characters."""
    return "".join(CHARACTERS[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Problems:
    """`prompts` (n, 6) and their `answers` (n, 2), both int64 token numbers."""

    prompts: torch.Tensor
    answers: torch.Tensor

    def __len__(self) -> int:
        return len(self.prompts)


def _problems(digits: list[tuple[int, ...]]) -> Problems:
    prompts = [encode("+".join(map(str, addends)) + "=") for addends in digits]
    answers = [encode(f"{sum(addends):02d}") for addends in digits]
    return Problems(torch.tensor(prompts, device="cpu"), torch.tensor(answers, device="cpu"))


@cache
def _split() -> tuple[Problems, Problems]:
    held_out: set[tuple[int, ...]] = set()
    multisets = list(itertools.combinations_with_replacement(range(10), 3))
    random.Random(_SPLIT_SEED).shuffle(multisets)
    for distinct, count in _HELD_OUT.items():
        held_out.update([multiset for multiset in multisets if len(set(multiset)) == distinct][:count])
    every = list(itertools.product(range(10), repeat=3))
    return (
        _problems([addends for addends in every if tuple(sorted(addends)) not in held_out]),
        _problems([addends for addends in every if tuple(sorted(addends)) in held_out]),
    )


def training() -> Problems:
    """The 796 training problems."""
    return _split()[0]


def held_out() -> Problems:
    """The 204 problems for evaluation."""
    return _split()[1]


def reward(samples: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 where both characters of a sample (n, 2) are those of its answer (n, 2), else 0.0: float32 (n,)."""
    return (samples == answers).all(dim=1).to(torch.float32)
