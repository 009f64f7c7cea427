"""Rewards that compare an answer's text: with the reference, or with a regular expression."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from holdfast.comms.errors import describe
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.reward import JudgedAnswer, Reward, Score, is_bounded, is_cancelled


@dataclass(frozen=True, slots=True)
class Criterion:
    """A reward and its weight, which may be negative. `name` is that of the part of the score."""

    name: str
    weight: float
    reward: Reward


class Rubric:
    """The sum of the criteria's scores, each times its weight; the parts are the criteria's own scores."""

    def __init__(self, criteria: Sequence[Criterion], name: str = "rubric") -> None:
        self.name, self._criteria = name, tuple(criteria)
        self._weights = [each.weight for each in self._criteria]
        self._names = names = [each.name for each in self._criteria]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a rubric needs criteria with names of their own, not {names}")
        self.bounded = all(is_bounded(each.reward) for each in self._criteria)

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """Weighted sums. Raises `RewardFailed`, which names the criterion."""
        if len(self._criteria) == 1:  # without a task of its own
            columns = [await self._column(self._criteria[0], answers)]
        else:
            columns = await asyncio.gather(*(self._column(each, answers) for each in self._criteria))
        return [
            Score(sum(map(mul, self._weights, row)), dict(zip(self._names, row, strict=True)))
            for row in zip(*columns, strict=True)
        ]

    async def _column(self, criterion: Criterion, answers: Sequence[JudgedAnswer]) -> list[float]:
        try:
            return [each.value for each in await criterion.reward.score(answers)]
        except BaseException as error:
            if is_cancelled(error):
                raise
            number = answers[0].prompt.number
            raise RewardFailed(self.name, number, f"criterion {criterion.name!r}: {describe(error)}") from error


class LengthPenalty:
    """0 up to `most - margin` tokens, falling to -1 at `most`: DAPO's soft overlong punishment (2503.14476, eq. 13)."""

    name = "length"
    bounded = True

    def __init__(self, most: int, margin: int) -> None:
        if not 0 < margin <= most:
            raise ValueError(f"margin={margin} must be from 1 to most={most}")
        self._most, self._margin = most, margin

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """From -1 to 0 for each answer."""
        free = self._most - self._margin
        return [Score(-min(1.0, max(0, each.length - free) / self._margin)) for each in answers]


class ExactMatch:
    """1 for an answer that is the prompt's reference, without white space around it; else 0.

    With `extract`, the answer is the first group of that regular expression's last match.
    """

    name = "exact"

    def __init__(self, extract: str = "") -> None:
        self._extract = re.compile(extract, re.DOTALL) if extract else None
        if self._extract is not None and self._extract.groups != 1:
            raise ValueError(f"extract={extract!r} must have one group, which is the answer")
        self.bounded = self._extract is None  # the time of a regular expression may grow exponentially with the text

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """1 or 0 for each answer."""
        if self._extract is None:
            return [Score(float(each.text.strip() == each.prompt.answer.strip())) for each in answers]
        return [Score(float(_last(self._extract, each.text) == each.prompt.answer.strip())) for each in answers]


def _last(extract: re.Pattern[str], text: str) -> str | None:
    found = extract.findall(text)
    return found[-1].strip() if found else None


class FormatMatch:
    """1 for an answer that a regular expression matches as a whole; else 0."""

    name = "format"

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """1 or 0 for each answer."""
        return [Score(float(self._pattern.fullmatch(each.text) is not None)) for each in answers]
