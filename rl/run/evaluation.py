"""Evaluation beside training: greedy completions of held-out prompts, and the best version kept."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Completion, Episode, Prompt
from holdfast.rl.environments.play import EnvironmentGames
from holdfast.rl.errors import OtherVersion, RewardFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.loop import Generate
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Score
from holdfast.store import Lease, WeightStore
from holdfast.store.interop.safetensors import export_version

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


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of held-out episodes, how many failed, and the versions of all their tokens."""

    rewards: tuple[float, ...]
    failed: int
    versions: tuple[int, ...]


async def judged(
    generate: Generate, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling, version: int | None
) -> tuple[Sequence[Completion], list[Score | RewardFailed]]:
    """The likeliest completion of each prompt under a version (None: the one that serves), and its score."""
    completions = await generate(sampling.greedy((each.tokens for each in prompts), version))
    return completions, await judge.scores(prompts, completions)


async def play_prompts(
    generate: Generate, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling, version: int
) -> HeldOutResult:
    """Completions of held-out prompts under a version, judged by the reward."""
    completions, scores = await judged(generate, judge, prompts, sampling, version)
    rewards = tuple(each.value for each in scores if isinstance(each, Score))
    return HeldOutResult(
        rewards=rewards,
        failed=len(scores) - len(rewards),
        versions=tuple(each for completion in completions for each in completion.versions),
    )


async def play_games(
    generate: Generate, games: EnvironmentGames, count: int, sampling: Sampling, version: int
) -> HeldOutResult:
    """Held-out episodes of an environment under a version."""
    found = await held_out_episodes(generate, games, count, sampling, version)
    drawn = [v for each in found for v, mine in zip(each.versions, each.mask, strict=True) if mine]
    return HeldOutResult(rewards=tuple(each.reward for each in found), failed=count - len(found), versions=tuple(drawn))


async def held_out_episodes(
    generate: Generate, games: EnvironmentGames, count: int, sampling: Sampling, exact: int | None
) -> list[Episode]:
    """`count` greedy episodes without those that failed, as many at a time as a group has."""

    async def part(first: int) -> Sequence[Episode]:
        async with games.held_out(first, min(sampling.group, count - first)) as game:
            while waiting := game.waiting:
                await game.act(await generate(sampling.greedy(waiting.values(), exact)))
            return game.episodes()

    parts = await asyncio.gather(*map(part, range(0, count, sampling.group)))
    return [each for found in parts for each in found]


class HeldOutEvaluation:
    """Evaluates every `every`-th version, which must be served until the evaluation has settled; 0: none.

    One runs at a time. `play` plays all held-out episodes greedily, under exactly a version. `on_score` is called with
    each score, and whether it is the best; `best` is the best so far, also of a run that this one continues.
    """

    def __init__(
        self,
        play: Callable[[int], Awaitable[HeldOutResult]],
        every: int,
        checkpoints: BestVersion,
        on_score: Callable[[EvaluationScore, bool], None] = lambda score, best: None,
        best: EvaluationScore | None = None,
    ) -> None:
        self.best = best
        self._play, self._every, self._checkpoints, self._on_score = play, every, checkpoints, on_score
        self._running: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Begin to evaluate `version` if it is due."""
        if self._every and version % self._every == 0:
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
        played = await self._play(version)
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
        self._on_score(score, self.best is score)


RECORD = "best.json"
STORE_SECONDS = 60.0
"""Seconds in which the store must have a version, and write it to disk."""


class BestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The best version so far, its reward, and the name of its folder."""

    version: int
    reward: float
    folder: str


def read_best(directory: Path) -> BestRecord | None:
    """The record in a directory of the best version; None if there is none yet. Raises `CorruptData`."""
    record = directory / RECORD
    if not record.exists():
        return None
    try:
        return msgspec.json.decode(record.read_bytes(), type=BestRecord)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{record} is no record of a best version: {error}; delete it") from error


class BestVersion:
    """Holds versions of a store while they are evaluated, and keeps the best one in `directory`.

    The record there names the best one's folder, which is whole; another run may go on from it. Raises `CorruptData`
    for a record that cannot be read.
    """

    def __init__(self, store: WeightStore, directory: Path, source: ModelSource) -> None:
        self._store, self._directory, self._source = store, directory, source
        self._held: dict[int, Lease] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._best = read_best(directory)

    @property
    def folder(self) -> Path | None:
        """The folder of the best version."""
        return None if self._best is None else self._directory / self._best.folder

    async def hold(self, version: int) -> None:
        """Wait for a version, and keep it in the store until it is released. Raises the store's errors."""
        await asyncio.to_thread(self._hold, version)

    async def keep_best(self, version: int, reward: float) -> None:
        """Write a held version to disk as the best one, instead of the one before, and release it."""
        await asyncio.to_thread(self._keep, version, reward)
        await self.release(version)

    async def release(self, version: int) -> None:
        """Let a held version go; no effect if it is not held."""
        lease = self._held.pop(version, None)
        if lease is not None:
            await asyncio.to_thread(lease.release)

    def _hold(self, version: int) -> None:
        self._store.wait(version, STORE_SECONDS)
        self._held[version] = self._store.pin(version)

    def _keep(self, version: int, reward: float) -> None:
        before = self.folder
        folder = self._directory / f"version-{version}"
        if folder == before:  # of a driver before this one: the number may have had other weights then
            folder = self._directory / f"version-{version}-again"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that died before it was in the record
        export_version(self._store, version, folder, timeout=STORE_SECONDS)
        self._source.save_config(folder)
        best = BestRecord(version=version, reward=reward, folder=folder.name)
        draft = self._directory / f"{RECORD}.draft"
        draft.write_bytes(msgspec.json.encode(best))
        draft.replace(self._directory / RECORD)
        self._best = best
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
