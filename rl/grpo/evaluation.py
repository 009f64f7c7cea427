"""Evaluation beside training: greedy completions of held-out prompts, and the best version kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Completion, Episode, Prompt
from holdfast.rl.data.errors import OtherVersion
from holdfast.rl.grpo.protocols import Games, Generation, Policy
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Score

COMPARABLE = 0.1
"""The share of episodes that one evaluation may have judged more than another, if their rewards are to be compared."""


class EvaluationScore(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of the held-out episodes of one version that could be judged; None if none could.

    `judged` is their number, `failed` that of the others: they died, or their rewards failed.
    """

    version: int
    reward: float | None
    judged: int
    failed: int

    def is_better(self, best: EvaluationScore | None) -> bool:
        """Whether this is the best version from now on.

        Between evaluations that judged about as many episodes, the reward decides; else the one that judged more wins.
        """
        if self.reward is None or best is None or best.reward is None:
            return self.reward is not None
        more = (best.failed - self.failed) / (self.judged + self.failed)
        return more > 0 if abs(more) > COMPARABLE else self.reward > best.reward


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

    async def play(self, policy: Policy, version: int, /) -> HeldOutResult:
        """Play all of them greedily, under exactly this version."""
        ...


class HeldOutPrompts:
    """Completions of held-out prompts, judged by the reward."""

    def __init__(self, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._judge, self._prompts, self._sampling = judge, tuple(prompts), sampling

    async def play(self, policy: Policy, version: int) -> HeldOutResult:
        """See `HeldOut`."""
        completions, scores = await judged(policy.generate, self._judge, self._prompts, self._sampling, version)
        rewards = tuple(each.value for each in scores if isinstance(each, Score))
        return HeldOutResult(
            rewards=rewards,
            failed=len(scores) - len(rewards),
            versions=tuple(each for completion in completions for each in completion.versions),
        )


class HeldOutGames:
    """Held-out episodes of an evaluation, `count` of them, as many at a time as a group has."""

    def __init__(self, games: Games, count: int, sampling: Sampling) -> None:
        self._games, self._count, self._sampling = games, count, sampling

    async def play(self, policy: Policy, version: int) -> HeldOutResult:
        """See `HeldOut`."""
        found = await self.episodes(policy.generate, version)
        drawn = [v for each in found for v, mine in zip(each.versions, each.mask, strict=True) if mine]
        return HeldOutResult(
            rewards=tuple(each.reward for each in found), failed=self._count - len(found), versions=tuple(drawn)
        )

    async def episodes(self, generation: Generation, exact: int | None) -> list[Episode]:
        """The episodes, without those that failed."""
        starts = range(0, self._count, self._sampling.group)
        parts = await asyncio.gather(*(self._part(generation, exact, at) for at in starts))
        return [each for part in parts for each in part]

    async def _part(self, generation: Generation, exact: int | None, first: int) -> Sequence[Episode]:
        async with self._games.held_out(first, min(self._sampling.group, self._count - first)) as game:
            while waiting := game.waiting:
                request = self._sampling.greedy_turn(tuple(waiting.values()), exact)
                await game.act(await generation.route(request))
            return game.episodes()


class HeldOutEvaluation:
    """Evaluates every `every`-th version, which must be served until the evaluation has settled. One runs at a time.

    `on_score` is called with each score; `best` is the best so far, also of a run that this one continues.
    """

    def __init__(
        self,
        policy: Policy,
        held_out: HeldOut,
        every: int,
        checkpoints: VersionHolder,
        on_score: Callable[[EvaluationScore], None] = lambda score: None,
        best: EvaluationScore | None = None,
    ) -> None:
        self.best = best
        self._policy, self._held_out, self._checkpoints = policy, held_out, checkpoints
        self._every, self._on_score = every, on_score
        self._running: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Begin to evaluate `version` if it is due."""
        if version % self._every == 0:
            await self.settle()
            await self._checkpoints.hold(version)
            self._running = asyncio.create_task(self._evaluate(version))

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

    async def _evaluate(self, version: int) -> None:
        played = await self._held_out.play(self._policy, version)
        if others := set(played.versions) - {version}:
            raise OtherVersion(version, sorted(others))
        judged = len(played.rewards)
        reward = sum(played.rewards) / judged if judged else None
        score = EvaluationScore(version=version, reward=reward, judged=judged, failed=played.failed)
        if reward is not None and score.is_better(self.best):
            self.best = score
            await self._checkpoints.keep_best(version, reward)
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
