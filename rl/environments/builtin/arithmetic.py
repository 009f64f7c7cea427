"""`arithmetic`: a sum of numbers in one turn, `7+8+5=`, with an exact reward."""

from __future__ import annotations

import random
import re
from typing import Literal

from holdfast.rl.data import arithmetic
from holdfast.rl.environments.environment import Action, Environment, Observation
from holdfast.rl.environments.errors import EpisodeOver, UnknownEnvironment

_NUMBER = re.compile(r"-?\d+")


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
        self._problems = {"": (), "train": arithmetic.training(), "held_out": arithmetic.held_out()}[split]
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
        found = _NUMBER.search(action.text)
        right = found is not None and int(found[0][:1000]) == self._sum
        if self._written:
            right = action.text.strip() == self._written
        answer, self._sum = self._sum, None
        return Observation(text="right" if right else f"wrong: it is {answer}", reward=float(right), done=True)
