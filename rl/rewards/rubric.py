"""A rubric: the weighted sum of named criteria."""

from __future__ import annotations

import asyncio
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
