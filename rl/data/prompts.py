"""Prompts in a seeded order, epoch after epoch: prompt `number` is a pure function of data, seed and number.

Seeds, the tokenizer that needs no file, and the arithmetic task stand here too.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.comms.errors import UNDECODABLE
from holdfast.rl.data.episode import Prompt
from holdfast.rl.errors import BadDataset


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed that depends on all of `parts`: equal on every machine, and far apart for near parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seeds_of(*parts: int | str, each: Iterable[int]) -> tuple[int, ...]:
    """The seeds of `parts` with one more part: `seed_of(*parts, one)` for each one."""
    common = "/".join(map(str, parts)).encode() + b"/"
    digest, number = hashlib.blake2b, int.from_bytes
    return tuple([number(digest(common + b"%d" % one, digest_size=8).digest(), "big") >> 1 for one in each])


class Tokenizer(Protocol):
    """What prompts need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Text to token numbers."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Token numbers to text."""
        ...


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a data set: the prompt's text and the answer that the reward compares with."""

    prompt: str
    answer: str = ""


class PromptSource:
    """All epochs of a data set: each holds every problem once, in an order of its own.

    `seed` alone decides the order, so a run resumes by prompt numbers. Raises `BadDataset`.
    """

    def __init__(self, problems: Sequence[Problem], tokenizer: Tokenizer, seed: int, name: str = "data set") -> None:
        if not problems:
            raise BadDataset(name, None, "it has no prompts")
        self.problems, self._seed = tuple(problems), seed
        self._tokens: list[tuple[int, ...]] = []
        for line, problem in enumerate(self.problems, start=1):
            self._tokens.append(_encoded(problem, tokenizer, name, line))
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def __len__(self) -> int:
        """The number of problems of an epoch."""
        return len(self.problems)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(map(len, self._tokens))

    def prompt(self, number: int) -> Prompt:
        """The prompt at position `number` of the data order."""
        epoch, place = divmod(number, len(self.problems))
        index = self._order(epoch)[place]
        problem = self.problems[index]
        return Prompt(number=number, tokens=self._tokens[index], text=problem.prompt, answer=problem.answer)

    def _shuffled(self, epoch: int) -> tuple[int, ...]:
        order = list(range(len(self.problems)))
        random.Random(seed_of("epoch", self._seed, epoch)).shuffle(order)
        return tuple(order)


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a file with one `{"prompt": ..., "answer": ...}` a line. Raises `BadDataset`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadDataset(str(path), None, f"cannot be read: {error.strerror or error}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problems.append(msgspec.json.decode(line, type=Problem))
        except UNDECODABLE as error:
            raise BadDataset(str(path), number, f'not a line of {{"prompt", "answer"}}: {error}') from None
    if not problems:
        raise BadDataset(str(path), None, "it has no prompts")
    return tuple(problems)


def _encoded(problem: Problem, tokenizer: Tokenizer, name: str, number: int) -> tuple[int, ...]:
    try:
        tokens = tuple(tokenizer.encode(problem.prompt))
    except (ValueError, KeyError) as error:
        raise BadDataset(
            name, None, f"the tokenizer cannot encode prompt {number}, {problem.prompt!r}: {error}"
        ) from error
    if not tokens:
        raise BadDataset(name, None, f"prompt {number}, {problem.prompt!r}, has no tokens")
    return tokens


ARITHMETIC_CHARACTERS = "0123456789+= \n"
PRINTABLE_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


class CharacterTokenizer:
    """One token for each of `characters`. Others become `unknown`; without one they are refused."""

    def __init__(self, characters: str = ARITHMETIC_CHARACTERS, unknown: str = "") -> None:
        self._characters = characters
        self._numbers = {each: number for number, each in enumerate(characters)}
        self._unknown = self._numbers[unknown] if unknown else None

    def encode(self, text: str) -> list[int]:
        """Characters to token numbers. Raises ValueError for a character that is not in the vocabulary."""
        found = [self._numbers.get(character, self._unknown) for character in text]
        if None in found:
            raise ValueError(f"{text[found.index(None)]!r} is none of the characters {self._characters!r}")
        return [each for each in found if each is not None]

    def decode(self, tokens: Sequence[int]) -> str:
        """Token numbers to characters."""
        return "".join(map(self._characters.__getitem__, tokens))


_SPLIT_SEED = 20
_HELD_OUT = {3: 24, 2: 19, 1: 3}
"""Held-out multisets by their number of distinct digits: a fifth of each kind, and 204 problems in all."""


def arithmetic_training() -> tuple[Problem, ...]:
    """The 796 training problems of the arithmetic task: sums of three digits, `7+8+5=` -> `20`.

    An answer has exactly two characters. The other 204 of the 1,000 problems are never trained on, nor is any
    reordering of them (`8+7+5=` is held out with `7+8+5=`): the split is by multiset, the same for every seed.
    """
    return _arithmetic_split()[0]


def arithmetic_held_out() -> tuple[Problem, ...]:
    """The 204 problems of the arithmetic task for evaluation."""
    return _arithmetic_split()[1]


@cache
def _arithmetic_split() -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    held_out: set[tuple[int, ...]] = set()
    multisets = list(itertools.combinations_with_replacement(range(10), 3))
    random.Random(_SPLIT_SEED).shuffle(multisets)
    for distinct, count in _HELD_OUT.items():
        held_out.update([multiset for multiset in multisets if len(set(multiset)) == distinct][:count])
    every = list(itertools.product(range(10), repeat=3))
    return (
        tuple(_sum_of(addends) for addends in every if tuple(sorted(addends)) not in held_out),
        tuple(_sum_of(addends) for addends in every if tuple(sorted(addends)) in held_out),
    )


def _sum_of(addends: tuple[int, ...]) -> Problem:
    return Problem(prompt="+".join(map(str, addends)) + "=", answer=f"{sum(addends):02d}")
