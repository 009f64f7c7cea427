"""Evaluation beside training: greedy completions of held-out prompts, and the best version kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.rl.algorithms.protocols import Buffer, Generation, Policy
from holdfast.rl.config.sampling import Sampling
from holdfast.rl.data.episode import Completion, Prompt
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Score


class EvaluationScore(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of held-out prompts; `oldest` and `newest` are the versions that drew the completions.

    An episode with a failed reward counts 0; `failed` says how many there were.
    """

    version: int
    oldest: int
    newest: int
    reward: float
    failed: int


class VersionHolder(Protocol):
    """Holds versions of the weights for the evaluation."""

    async def hold(self, version: int, /) -> None:
        """Keep `version` until it is released."""
        ...

    async def keep_best(self, version: int, reward: float, /) -> None:
        """Keep a held version as the best one, instead of the one before."""
        ...

    async def release(self, version: int, /) -> None:
        """A held version is not the best."""
        ...


async def judged(
    generation: Generation, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling, version: int | None
) -> tuple[Sequence[Completion], list[Score | RewardFailed]]:
    """The likeliest completion of each prompt under a version (None: the one that serves), and its score."""
    completions = await generation.route(sampling.greedy(tuple(prompts), version))
    return completions, await judge.scores(prompts, completions)


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of held-out episodes, how many failed, and the versions of all their tokens."""

    rewards: tuple[float, ...]
    failed: int
    versions: tuple[int, ...]


class HeldOut(Protocol):
    """The episodes of an evaluation."""

    async def play(self, policy: Policy, exact: int | None, /) -> HeldOutResult:
        """Play all of them greedily, under exactly one version if it is given."""
        ...


class HeldOutPrompts:
    """Completions of held-out prompts, judged by the reward."""

    def __init__(self, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._judge, self._prompts, self._sampling = judge, tuple(prompts), sampling

    async def play(self, policy: Policy, exact: int | None) -> HeldOutResult:
        """See `HeldOut`."""
        completions, scores = await judged(policy.generate, self._judge, self._prompts, self._sampling, exact)
        rewards = tuple(each.value for each in scores if isinstance(each, Score))
        return HeldOutResult(
            rewards=rewards,
            failed=len(scores) - len(rewards),
            versions=tuple(each for completion in completions for each in completion.versions),
        )


class HeldOutEvaluation:
    """Evaluates every `every`-th version. One evaluation runs at a time; the next begins after it.

    `on_score` is called with each score; `best` is the best so far, also of a run that this one continues.
    """

    def __init__(
        self,
        policy: Policy,
        held_out: HeldOut,
        buffer: Buffer,
        every: int,
        checkpoints: VersionHolder,
        on_score: Callable[[EvaluationScore], None] = lambda score: None,
        best: EvaluationScore | None = None,
    ) -> None:
        self.best = best
        self._policy, self._held_out, self._buffer, self._checkpoints = policy, held_out, buffer, checkpoints
        self._every, self._on_score = every, on_score
        self._running: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Begin to evaluate `version` if it is due."""
        if version % self._every == 0:
            await self.settle()
            await self._checkpoints.hold(version)
            self._running = asyncio.create_task(self._evaluate(version, self._buffer.required_version))

    async def settle(self) -> None:
        """Wait for the evaluation that runs; raises its error."""
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def stop(self) -> None:
        """End the evaluation that runs, without its score or its error. Idempotent."""
        if self._running is not None:
            running, self._running = self._running, None
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _evaluate(self, version: int, exact: int | None) -> None:
        played = await self._held_out.play(self._policy, exact)
        score = EvaluationScore(
            version=version,
            oldest=min(played.versions, default=version),
            newest=max(played.versions, default=version),
            reward=sum(played.rewards) / (len(played.rewards) + played.failed),
            failed=played.failed,
        )
        if self.best is None or score.reward > self.best.reward:
            self.best = score
            await self._checkpoints.keep_best(version, score.reward)
        else:
            await self._checkpoints.release(version)
        self._on_score(score)


class NoEvaluation:
    """Evaluates nothing."""

    best: EvaluationScore | None = None

    async def begin(self, version: int) -> None:
        """Nothing is due."""

    async def settle(self) -> None:
        """Nothing was begun."""

    async def stop(self) -> None:
        """Nothing runs."""
