"""Rewards: functions of one answer, and their weighted sum, in which a failure fails one answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.comms.errors import describe
from holdfast.rl.data.episode import MOST_REWARD, Prompt, is_usable_reward
from holdfast.rl.errors import RewardFailed


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A completion as a reward sees it: `text` is without the stop token, `length` counts all tokens."""

    prompt: Prompt
    text: str
    length: int


class Score(msgspec.Struct, frozen=True):
    """The reward of an answer, and its named parts."""

    value: float
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Criterion:
    """A function of an answer, and its weight, which may be negative. `name` is that of the part of the score."""

    name: str
    weight: float
    function: Callable[[JudgedAnswer], float]


class Rubric:
    """The sum of the criteria's values, each times its weight; the parts are the values."""

    def __init__(self, criteria: Sequence[Criterion]) -> None:
        self._criteria = tuple(criteria)
        names = [each.name for each in self._criteria]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a rubric needs criteria with names of their own, not {names}")
        self._name = names[0] if len(names) == 1 else "rubric"

    def score(self, answer: JudgedAnswer) -> Score | RewardFailed:
        """The score of an answer, or its failure: a criterion may raise whatever it likes."""
        number, parts, total = answer.prompt.number, dict[str, float](), 0.0
        for each in self._criteria:
            try:
                parts[each.name] = value = float(each.function(answer))
            except BaseException as error:  # SystemExit of a verifier must end one episode, not the process
                return RewardFailed(each.name, number, describe(error))
            if not math.isfinite(value):
                return RewardFailed(each.name, number, f"its value is {value}")
            total += each.weight * value
        if not is_usable_reward(total):
            return RewardFailed(self._name, number, f"its value is {total}, beyond {MOST_REWARD:g}")
        return Score(total, parts)


class LengthPenalty:
    """0 up to `most - margin` tokens, falling to -1 at `most`: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

    def __init__(self, most: int, margin: int) -> None:
        if not 0 < margin <= most:
            raise ValueError(f"margin={margin} must be from 1 to most={most}")
        self._most, self._margin = most, margin

    def __call__(self, answer: JudgedAnswer) -> float:
        return -min(1.0, max(0, answer.length - (self._most - self._margin)) / self._margin)


class ExactMatch:
    """1 for an answer that is the prompt's reference, without white space around it; else 0.

    With `extract`, the answer is the first group of that regular expression's last match.
    """

    def __init__(self, extract: str = "") -> None:
        self._extract = re.compile(extract, re.DOTALL) if extract else None
        if self._extract is not None and self._extract.groups != 1:
            raise ValueError(f"extract={extract!r} must have one group, which is the answer")

    def __call__(self, answer: JudgedAnswer) -> float:
        found = [answer.text] if self._extract is None else self._extract.findall(answer.text)
        return float(bool(found) and found[-1].strip() == answer.prompt.answer.strip())


class FormatMatch:
    """1 for an answer that a regular expression matches as a whole; else 0."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, answer: JudgedAnswer) -> float:
        return float(self._pattern.fullmatch(answer.text) is not None)
