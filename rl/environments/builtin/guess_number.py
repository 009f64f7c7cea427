"""`guess`: a hidden number in several turns, with a hint after each guess."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.errors import UnknownEnvironment

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
