"""The protocol of rewards, and how a reward's failure becomes the failure of one answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from holdfast.comms.errors import describe
from holdfast.rl.data.episode import MOST_REWARD, Prompt, is_usable_reward
from holdfast.rl.rewards.errors import RewardFailed


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
