"""`Judge`: makes groups of completions, with the scores that a reward gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from holdfast.rl.data.episode import Completion, Episode, Group, Prompt
from holdfast.rl.data.prompts import Tokenizer
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.reward import JudgedAnswer, Reward, Score, is_bounded, score_each
from holdfast.rl.rewards.reward_processes import RewardProcesses


class Judge:
    """Makes groups of a prompt's completions, by a reward. Use it as `async with`, or `start` and `close` it.

    A reward that is not `bounded` judges in processes of its own, where each answer may take `timeout` seconds.
    `on_failure` is called with the failure of each episode that is left out; `failures` counts them.
    """

    def __init__(
        self,
        reward: Reward | RewardProcesses,
        tokenizer: Tokenizer,
        on_failure: Callable[[RewardFailed], None] = lambda failed: None,
        timeout: float = 60.0,
    ) -> None:
        self.failures = 0
        if not isinstance(reward, RewardProcesses) and not is_bounded(reward):
            reward = RewardProcesses(partial(_same, reward))
        self._reward, self._tokenizer, self._on_failure, self._timeout = reward, tokenizer, on_failure, timeout

    async def start(self) -> None:
        """Start the first process, if the reward needs one. Raises what makes the reward unusable."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.start()

    async def close(self) -> None:
        """End the processes. Idempotent."""
        if isinstance(self._reward, RewardProcesses):
            await self._reward.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def scores(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score | RewardFailed]:
        """The score of each prompt's completion, or its failure."""
        answers = [
            JudgedAnswer(prompt=prompt, text=self.text(completion), length=len(completion.tokens))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if isinstance(self._reward, RewardProcesses):
            scores = await self._reward.score_each(answers, self._timeout)
        else:
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


async def _same(reward: Reward) -> Reward:
    return reward
