"""Environments that need nothing but holdfast: `arithmetic` and `guess`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from holdfast.rl.data.prompts import arithmetic_held_out, arithmetic_training
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.errors import EpisodeOver, UnknownEnvironment

_SUM = re.compile(r"-?\d+")


class ArithmeticEnvironment(Environment):
    """Asks for the sum of `terms` numbers of `digits` digits; reward 1 if the answer's first number is it.

    With a `split`, it asks the problems of the arithmetic task that are for training, or those that are held out, and
    rewards their answers of two characters.
    """

    def __init__(self, terms: int = 3, digits: int = 1, split: Literal["", "train", "held_out"] = "") -> None:
        if not 2 <= terms <= 100 or not 1 <= digits <= 100:
            raise UnknownEnvironment(
                "arithmetic", f"terms={terms} and digits={digits} must be in 2 to 100 and 1 to 100"
            )
        if split and (terms, digits) != (3, 1):
            raise UnknownEnvironment("arithmetic", f"split={split} has sums of three digits: leave terms and digits")
        self._terms, self._most = terms, 10**digits - 1
        self._problems = {"": (), "train": arithmetic_training(), "held_out": arithmetic_held_out()}[split]
        self._sum: int | None = None
        self._written = ""

    def reset(self, seed: int) -> Observation:
        numbers = random.Random(seed)
        if self._problems:
            problem = numbers.choice(self._problems)
            self._sum, self._written = int(problem.answer), problem.answer
            return Observation(text=problem.prompt)
        addends = [numbers.randint(0, self._most) for _ in range(self._terms)]
        self._sum = sum(addends)
        return Observation(text="+".join(map(str, addends)) + "=", fields={"addends": addends})

    def step(self, action: Action) -> Observation:
        if self._sum is None:
            raise EpisodeOver("arithmetic", "it has one step")
        found = _SUM.search(action.text)
        right = found is not None and int(found[0][:1000]) == self._sum
        if self._written:
            right = action.text.strip() == self._written
        answer, self._sum = self._sum, None
        return Observation(text="right" if right else f"wrong: it is {answer}", reward=float(right), done=True)


_NUMBER = re.compile(r"-?\d{1,18}")


class GuessNumberEnvironment(Environment):
    """Hides a number from 1 to `high`. The right guess within `turns` has reward 1, others get a hint.

    A guess is the first number of the text, or the field `number`. A text without one costs a turn.
    """

    def __init__(self, high: int = 100, turns: int = 7) -> None:
        if high < 1 or turns < 1:
            raise UnknownEnvironment("guess", f"high={high} and turns={turns} must be positive")
        self._high, self._turns = high, turns
        self._secret, self._left = 0, 0

    def reset(self, seed: int) -> Observation:
        self._secret, self._left = random.Random(seed).randint(1, self._high), self._turns
        return self._observe(f"guess a number from 1 to {self._high}", reward=None)

    def step(self, action: Action) -> Observation:
        self._left -= 1
        guess = _guess(action)
        if guess == self._secret:
            return self._observe("right", reward=1.0, done=True)
        hint = "no number" if guess is None else "higher" if guess < self._secret else "lower"
        return self._observe(hint, reward=0.0, done=self._left <= 0)

    def state(self) -> Mapping[str, Any]:
        return {"high": self._high, "turns_left": self._left}

    def _observe(self, text: str, reward: float | None, done: bool = False) -> Observation:
        return Observation(text=text, fields={"turns_left": self._left}, reward=reward, done=done)


def _guess(action: Action) -> int | None:
    number = action.fields.get("number")
    if type(number) is int:
        return number
    found = _NUMBER.search(action.text)
    return int(found[0]) if found else None
