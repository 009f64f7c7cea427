"""The episodes of a run: completions of prompts that a reward judges, episodes played in an environment, or both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from holdfast.ft.console.units import counted
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, Group, Prompt
from holdfast.rl.data.replay_buffer import FailedGroup, ReplayBuffer
from holdfast.rl.environments.play import EnvironmentGames, EpisodeFailure, LineCodec
from holdfast.rl.errors import RewardFailed, RunFailed
from holdfast.rl.generators.models import ModelMisfit, ModelSource
from holdfast.rl.grpo.loop import Generate, generate_episode, play_episodes, together
from holdfast.rl.rewards.judge import Judge, reward_of
from holdfast.rl.run.environment_servers import EnvironmentServers, check_name
from holdfast.rl.run.evaluation import HeldOutResult, held_out_prompts, play_games, play_prompts
from holdfast.rl.run.policy import Task, check_policy, in_policy_process, task_of, tokenizer_of, warm_up, warmed_up
from holdfast.rl.run.run_events import EpisodeFailed
from holdfast.rl.run.services import RunServices
from holdfast.rl.run.telemetry import RunTelemetry


class RunEpisodes:
    """Makes the groups of a run, each from its number. `prepare` and `start` it before use, and `close` it.

    Of the groups a `share` is played in the environment, if there is one, and the others begin with prompts. Groups of
    one kind that fail, one after another, raise `RunFailed`.
    """

    def __init__(self, config: RunConfig, telemetry: RunTelemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._servers: EnvironmentServers | None = None
        self._failures = Counter[str]()
        """Groups that failed one after another, by what makes them."""
        self._judge: Judge | None = None
        self._task: Task
        self._games: EnvironmentGames

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy to begin with; `start` may save it in `folder`. Raises what is wrong with it, or with the task."""
        self._policy, self._folder = policy, folder
        check = partial(longest_sequence, self._config, policy)
        longest = await in_policy_process("the check of the model", check, folder)
        if self._config.has_prompts:
            await self._prepare_prompts(longest)
        if self._config.environment.name:
            self._limit = self._config.environment.max_tokens or longest
            self._tokenizer = await asyncio.to_thread(tokenizer_of, self._config)
        return warmed_up(policy, self._config.model, folder)

    async def start(self, services: RunServices) -> None:
        """Take the supervised steps, unless a driver before did, and start the servers. Raises `UnknownEnvironment`."""
        await together(self._warm_up, partial(self._start_servers, services))

    async def close(self) -> None:
        """Leave the servers, and end the processes of the reward. Idempotent."""
        if self._servers is not None:
            await self._servers.close()
        if self._judge is not None:
            await self._judge.close()

    async def add_next(self, generate: Generate, buffer: ReplayBuffer) -> None:
        """Begin the next group once the buffer admits it, and add it. See `generate_episode` and `play_episodes`."""
        config, number = self._config, (await buffer.admit()).number
        settings = (buffer, config.sampling, config.seed, config.objective.redraws)
        if config.environment.name and is_played(number, config.environment.share):
            await play_episodes(number, generate, self._games, *settings)
        else:
            await generate_episode(self._task.train.prompt(number), generate, self._evaluate, *settings)

    @property
    def has_held_out(self) -> bool:
        """Whether there are episodes for an evaluation."""
        return not self._config.has_prompts or self._task.held_out is not None

    async def play_held_out(self, generate: Generate, version: int) -> HeldOutResult:
        """Answer held-out prompts greedily, or play held-out episodes if there are none, under exactly this version."""
        sampling, wanted = self._config.sampling, self._config.evaluation.prompts
        if not self._config.has_prompts:
            return await play_games(generate, self._games, wanted, sampling, version, self._tokenizer.decode)
        assert self._judge is not None, "`prepare` makes it"
        prompts = held_out_prompts(self._config, self._task, wanted)
        return await play_prompts(generate, self._judge, prompts, sampling, version)

    async def _prepare_prompts(self, most: int) -> None:
        config = self._config
        self._task = task = await asyncio.to_thread(task_of, config)
        longest = max(source.longest for source in (task.train, task.held_out) if source is not None)
        if (tokens := longest + config.sampling.max_new_tokens) > most:
            why = f"the longest prompt and sampling.max_new_tokens make {tokens} tokens, and it attends to {most}"
            raise ModelMisfit(self._policy.name, why, "shorten the prompts, or lower sampling.max_new_tokens")
        reward = reward_of(config, self._folder.with_name("rewards.log"))
        self._judge = Judge(reward, task.tokenizer, self._answer_failed)
        await self._judge.start()  # raises what is wrong with the code of the reward

    async def _warm_up(self) -> None:
        config, folder = self._config, self._folder
        if config.model.warmup_steps and not folder.exists():
            task = self._task
            warm = partial(
                warm_up, self._policy, config.model, task.train.problems, task.tokenizer, config.seed, folder
            )
            await in_policy_process("the supervised steps", warm, folder)

    async def _start_servers(self, services: RunServices) -> None:
        """Start the servers, and begin an episode."""
        if self._config.environment.name:
            self._servers = EnvironmentServers(self._config, services)
            source = await self._servers.start()
            codec = LineCodec(self._tokenizer, beside_prompts=self._config.has_prompts)
            self._games = EnvironmentGames(
                source, codec, self._config, self._limit, self._game_failed, self._count_game
            )
            await self._games.check()

    async def _evaluate(self, prompt: Prompt, completions: Sequence[Completion]) -> Group | FailedGroup:
        assert self._judge is not None, "`prepare` makes it"
        group = await self._judge.evaluate(prompt, completions)
        self._count("the reward", group)
        return group

    def _count_game(self, group: Group | FailedGroup) -> None:
        self._count(f"environment {self._config.environment.name!r}", group)

    def _count(self, source: str, group: Group | FailedGroup) -> None:
        """Raise `RunFailed` once more than a batch of groups of `source` failed one after another."""
        if not isinstance(group, FailedGroup):
            del self._failures[source]
            return
        self._failures[source] += 1
        if self._failures[source] > max(8, self._config.algorithm.groups):
            raise RunFailed(
                f"{source} failed in {counted(self._failures[source], 'group')} one after another, "
                f"the last time: {group.reasons[0]}; see to it, and resume the run"
            )

    def _answer_failed(self, failed: RewardFailed) -> None:
        self._telemetry.emit(EpisodeFailed(time=self._telemetry.now(), prompt=failed.number, reason=str(failed)))

    def _game_failed(self, failed: EpisodeFailure) -> None:
        now = self._telemetry.now()
        event = EpisodeFailed(time=now, prompt=failed.number, reason=failed.reason, again=failed.again)
        self._telemetry.emit(event)


def longest_sequence(config: RunConfig, policy: ModelSource) -> int:
    """The most tokens of a sequence; 0 if the configuration says it. Raises `ModelMisfit`, `UnknownEnvironment`."""
    check_policy(config, policy)
    if config.environment.name:
        check_name(config.environment)
    return policy.longest_sequence() if config.has_prompts or not config.environment.max_tokens else 0


def is_played(number: int, share: float) -> bool:
    """Whether a group is one of the `share` that is played in an environment: these are spread evenly."""
    return int((number + 1) * share) > int(number * share)
