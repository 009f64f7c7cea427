"""Rewards: their protocol, those that compare texts, and how a failure becomes the failure of one answer."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol

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


class Reward(Protocol):
    """Judges answers. It may raise: that fails the episodes of the answers for which it raises."""

    name: str

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """One score for each answer, in order."""
        ...


def is_bounded(reward: Reward) -> bool:
    """Whether a reward may judge in an event loop: it runs no code of the user's, and is quick.

    A class says so by an attribute `bounded`; without it a reward judges where it can be ended.
    """
    return bool(getattr(reward, "bounded", False))


class FunctionReward:
    """A function of one answer as a reward. It may block, and raise what it likes: a `Judge` has processes for it."""

    def __init__(self, name: str, function: Callable[[JudgedAnswer], float]) -> None:
        self.name, self._function = name, function

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """The function's values."""
        return [Score(float(self._function(each))) for each in answers]


async def score_each(reward: Reward, answers: Sequence[JudgedAnswer], timeout: float) -> list[Score | RewardFailed]:
    """The scores of `answers`, or the failure of each that has none.

    If the reward raises for several answers together, whatever it raises, it is asked again for each by itself.
    """
    try:
        async with asyncio.timeout(timeout):
            scores = await reward.score(answers)
    except RewardFailed as error:
        failure = error.reason
    except TimeoutError as error:
        failure = describe(error) if str(error) else f"no score after {timeout:.3g} s"
    except BaseException as error:  # SystemExit of a verifier must end one episode, not the run
        if is_cancelled(error):
            raise
        failure = describe(error)
    else:
        if len(scores) == len(answers):
            return [
                score if _is_finite(score) else _not_finite(reward, each, score)
                for each, score in zip(answers, scores, strict=True)
            ]
        failure = f"{len(scores)} scores for {len(answers)} answers"
    if len(answers) == 1:
        return [RewardFailed(reward.name, answers[0].prompt.number, failure)]
    apart = await asyncio.gather(*(score_each(reward, [each], timeout) for each in answers))
    return [result for (result,) in apart]


def is_cancelled(error: BaseException) -> bool:
    """Whether an error is the cancellation of the task that meets it, and nothing that a reward has raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _is_finite(score: Score) -> bool:
    return is_usable_reward(score.value) and all(map(math.isfinite, score.parts.values()))


def _not_finite(reward: Reward, answer: JudgedAnswer, score: Score) -> RewardFailed:
    found = next((f"{name} is {value}" for name, value in score.parts.items() if not math.isfinite(value)), "")
    if not is_usable_reward(score.value):
        beyond = f", beyond {MOST_REWARD:g}" if math.isfinite(score.value) else ""
        found = f"its value is {score.value}{beyond}"
    return RewardFailed(reward.name, answer.prompt.number, found)


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
