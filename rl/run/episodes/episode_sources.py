"""What the episodes of a run come from: prompts and a reward, or an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from holdfast.rl.algorithms.episode import generate_episode
from holdfast.rl.algorithms.evaluation import HeldOut, HeldOutPrompts
from holdfast.rl.algorithms.protocols import Policy
from holdfast.rl.algorithms.turns import HeldOutGames, play_episodes
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.prompts import PromptNumbers, PromptStream
from holdfast.rl.data.replay_buffer import ReplayBuffer
from holdfast.rl.engine.engine import Engine
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.rewards.configured_reward import reward_of
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.reward import Judge
from holdfast.rl.run.episodes.environment_games import EnvironmentGames, EpisodeFailure
from holdfast.rl.run.episodes.environment_servers import EnvironmentServers
from holdfast.rl.run.episodes.episode_codec import codec_of
from holdfast.rl.run.policy_source import Task, task_of, tokenizer_of
from holdfast.rl.run.run_events import EpisodeFailed
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.run.warm_up import warmed_up


class EpisodeSource(Protocol):
    """Where the episodes of a run come from. `start` it before use, and `close` it."""

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy that the run begins with; `folder` may keep it. Raises what is wrong with the task."""
        ...

    async def start(self) -> None:
        """Start the processes that it needs."""
        ...

    async def close(self) -> None:
        """End them. Idempotent."""
        ...

    def episode(self, policy: Policy, buffer: ReplayBuffer) -> Callable[[], Awaitable[None]]:
        """What adds the next group to the buffer."""
        ...

    def held_out(self) -> HeldOut | None:
        """The episodes of an evaluation, if there are any."""
        ...


class PromptEpisodes:
    """Completions of prompts, judged by a reward."""

    def __init__(self, config: RunConfig, telemetry: RunTelemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._task: Task

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy after its supervised steps."""
        config = self._config
        self._task = task = await asyncio.to_thread(task_of, config)
        self._judge = Judge(await reward_of(config), task.tokenizer, self._failed)
        warm = partial(warmed_up, policy, config.model, task.problems, task.tokenizer, config.seed, folder)
        return await asyncio.to_thread(warm)

    async def start(self) -> None:
        """There is no process."""

    async def close(self) -> None:
        """There is no process."""

    def episode(self, policy: Policy, buffer: ReplayBuffer) -> Callable[[], Awaitable[None]]:
        """See `generate_episode`."""
        config, prompts = self._config, PromptStream(self._task.train, buffer)
        settings = (config.sampling, config.seed, config.objective.redraws)
        return partial(generate_episode, prompts, policy, self._judge, buffer, *settings)

    def held_out(self) -> HeldOut | None:
        """The first held-out prompts."""
        source, wanted = self._task.held_out, self._config.evaluation.prompts
        if source is None:
            return None
        prompts = [source.prompt(number) for number in range(min(wanted or len(source), len(source)))]
        return HeldOutPrompts(self._judge, prompts, self._config.sampling)

    def _failed(self, failed: RewardFailed) -> None:
        self._telemetry.emit(EpisodeFailed(time=self._telemetry.now(), prompt=failed.number, reason=str(failed)))


class EnvironmentEpisodes:
    """Episodes that are played in an environment."""

    def __init__(self, config: RunConfig, engine: Engine, telemetry: RunTelemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._servers = EnvironmentServers(config.environment, engine, telemetry)
        self._games: EnvironmentGames

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy as it is."""
        self._servers.check()
        self._limit = self._config.environment.max_tokens or await asyncio.to_thread(policy.longest_sequence)
        self._codec = codec_of(await asyncio.to_thread(tokenizer_of, self._config))
        return policy

    async def start(self) -> None:
        """Start the servers, and begin an episode. Raises `UnknownEnvironment`."""
        source = await self._servers.start()
        self._games = EnvironmentGames(source, self._codec, self._config, self._limit, self._failed)
        await self._games.check()

    async def close(self) -> None:
        """End the servers. Idempotent."""
        await self._servers.close()

    def episode(self, policy: Policy, buffer: ReplayBuffer) -> Callable[[], Awaitable[None]]:
        """See `play_episodes`."""
        config = self._config
        settings = (config.sampling, config.seed, config.objective.redraws)
        return partial(play_episodes, PromptNumbers(buffer), policy, self._games, buffer, *settings)

    def held_out(self) -> HeldOut | None:
        """Episodes of other seeds."""
        return HeldOutGames(self._games, self._config.evaluation.prompts, self._config.sampling)

    def _failed(self, failed: EpisodeFailure) -> None:
        now = self._telemetry.now()
        event = EpisodeFailed(time=now, prompt=failed.number, reason=failed.reason, again=failed.again)
        self._telemetry.emit(event)
