"""The protocol of rewards, and how a reward's failure becomes one failed episode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from holdfast.comms.errors import describe
from holdfast.rl.data.episode import Completion, Episode, Group, Prompt
from holdfast.rl.data.prompts import Tokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
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


class FunctionReward:
    """A function of one answer as a reward. It is called in a thread: it may block."""

    def __init__(self, name: str, function: Callable[[JudgedAnswer], float]) -> None:
        self.name, self._function = name, function

    async def score(self, answers: Sequence[JudgedAnswer]) -> Sequence[Score]:
        """The function's values."""
        return await asyncio.to_thread(lambda: [Score(float(self._function(each))) for each in answers])


async def score_each(reward: Reward, answers: Sequence[JudgedAnswer], timeout: float) -> list[Score | RewardFailed]:
    """The scores of `answers`, or the failure of each that has none.

    If the reward raises for several answers together, it is asked again for each by itself.
    """
    try:
        async with asyncio.timeout(timeout):
            scores = await reward.score(answers)
    except RewardFailed as error:
        failure = error.reason
    except TimeoutError as error:
        failure = describe(error) if str(error) else f"no score after {timeout:.3g} s"
    except Exception as error:
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


def _is_finite(score: Score) -> bool:
    return math.isfinite(score.value) and all(map(math.isfinite, score.parts.values()))


def _not_finite(reward: Reward, answer: JudgedAnswer, score: Score) -> RewardFailed:
    parts = (("its value", score.value), *score.parts.items())
    name, value = next((name, value) for name, value in parts if not math.isfinite(value))
    return RewardFailed(reward.name, answer.prompt.number, f"{name} is {value}")


class Judge:
    """Makes groups of a prompt's completions, by a reward.

    `on_failure` is called with the failure of each episode that is left out; `failures` counts them.
    """

    def __init__(
        self,
        reward: Reward,
        tokenizer: Tokenizer,
        on_failure: Callable[[RewardFailed], None] = lambda failed: None,
        timeout: float = 60.0,
    ) -> None:
        self.failures = 0
        self._reward, self._tokenizer, self._on_failure, self._timeout = reward, tokenizer, on_failure, timeout

    async def scores(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score | RewardFailed]:
        """The score of each prompt's completion, or its failure."""
        answers = [
            JudgedAnswer(prompt=prompt, text=self.text(completion), length=len(completion.tokens))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        scores = await score_each(self._reward, answers, self._timeout)
        for each in scores:
            if isinstance(each, RewardFailed):
                self.failures += 1
                self._on_failure(each)
        return scores

    async def evaluate(self, prompt: Prompt, completions: Sequence[Completion]) -> Group | FailedGroup:
        """The group of a prompt's completions; failed if fewer than two of them have a score."""
        scores = await self.scores([prompt] * len(completions), completions)
        episodes = [
            Episode(
                prompt=prompt,
                tokens=completion.tokens,
                logprobs=completion.logprobs,
                versions=completion.versions,
                mask=(True,) * len(completion.tokens),
                reward=score.value,
                finish=completion.finish,
                parts=score.parts,
            )
            for completion, score in zip(completions, scores, strict=True)
            if isinstance(score, Score) and completion.tokens
        ]
        if len(episodes) < 2:
            reasons = tuple(str(each) for each in scores if isinstance(each, RewardFailed))
            return FailedGroup(number=prompt.number, reasons=reasons or ("its completions are empty",))
        return Group(number=prompt.number, prompt=prompt, episodes=tuple(episodes))

    def text(self, completion: Completion) -> str:
        """The words of a completion, without its stop token."""
        tokens = completion.tokens[:-1] if completion.finish == "stop" else completion.tokens
        return self._tokenizer.decode(tokens)
