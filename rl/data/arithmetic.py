"""The arithmetic task: sums of three digits, `7+8+5=` -> `20`.

There are 1,000 problems. The 204 held-out ones are never trained on, nor is any reordering of them (`8+7+5=` is held
out with `7+8+5=`): the split is by multiset, the same for every seed. An answer has exactly two characters.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

from holdfast.rl.data.prompts import Problem

CHARACTERS = "0123456789+= \n"
_SPLIT_SEED = 20
_HELD_OUT = {3: 24, 2: 19, 1: 3}
"""Held-out multisets by their number of distinct digits: a fifth of each kind, and 204 problems in all."""


class CharacterTokenizer:
    """One token for each of the 14 characters of the task."""

    vocabulary = len(CHARACTERS)

    def encode(self, text: str) -> list[int]:
        """Characters to token numbers. Raises ValueError for a character that is not in the vocabulary."""
        return [CHARACTERS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Token numbers to characters."""
        return "".join(map(CHARACTERS.__getitem__, tokens))


def training() -> tuple[Problem, ...]:
    """The 796 training problems."""
    return _split()[0]


def held_out() -> tuple[Problem, ...]:
    """The 204 problems for evaluation."""
    return _split()[1]


@cache
def _split() -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    held_out: set[tuple[int, ...]] = set()
    multisets = list(itertools.combinations_with_replacement(range(10), 3))
    random.Random(_SPLIT_SEED).shuffle(multisets)
    for distinct, count in _HELD_OUT.items():
        held_out.update([multiset for multiset in multisets if len(set(multiset)) == distinct][:count])
    every = list(itertools.product(range(10), repeat=3))
    return (
        tuple(_problem(addends) for addends in every if tuple(sorted(addends)) not in held_out),
        tuple(_problem(addends) for addends in every if tuple(sorted(addends)) in held_out),
    )


def _problem(addends: tuple[int, ...]) -> Problem:
    return Problem(prompt="+".join(map(str, addends)) + "=", answer=f"{sum(addends):02d}")
