"""What the episodes of a run come from: prompts and a reward, an environment, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.service import ServiceStatus
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, Group, Prompt
from holdfast.rl.data.prompts import PromptNumbers, PromptStream
from holdfast.rl.data.replay_buffer import FailedGroup, ReplayBuffer
from holdfast.rl.generators.errors import ModelMisfit
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.evaluation import HeldOut, HeldOutGames, HeldOutPrompts
from holdfast.rl.grpo.loop import generate_episode, play_episodes
from holdfast.rl.grpo.protocols import Data, GroupNumbers, Policy
from holdfast.rl.rewards.configured_reward import reward_of
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.run.episodes.environment_games import EnvironmentGames, EpisodeFailure, FailuresInARow, codec_of
from holdfast.rl.run.episodes.environment_servers import EnvironmentServers, check_name
from holdfast.rl.run.policy.policy_process import in_policy_process
from holdfast.rl.run.policy.warm_up import warm_up, warmed_up
from holdfast.rl.run.policy_source import Task, task_of, tokenizer_of
from holdfast.rl.run.run_events import EpisodeFailed
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import WorkReport

T = TypeVar("T")

CHECK = "the check of the model"


async def all_done(first: Awaitable[T], *others: Awaitable[object]) -> T:
    """The result of `first` once all are done. If one raises, the others are cancelled, and its error raised."""
    wanted = asyncio.ensure_future(first)
    tasks: list[asyncio.Future[Any]] = [wanted, *(asyncio.ensure_future(each) for each in others)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return wanted.result()


class EpisodeSource(Protocol):
    """Where the episodes of a run come from. `start` it before use, and `close` it."""

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy to begin with; `start` may save it in `folder`. Raises what is wrong with the task."""
        ...

    async def start(self) -> None:
        """Start the processes that it needs, and save the policy."""
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

    def status(self) -> tuple[ServiceStatus, ...]:
        """The services that it needs, now. May be called from any thread."""
        ...

    async def work(self) -> Mapping[str, WorkReport]:
        """What its processes did since the last call, without those that do not answer."""
        ...


class PromptEpisodes:
    """Completions of prompts, judged by a reward. Groups that it fails, one after another, raise `RunFailed`."""

    def __init__(self, config: RunConfig, telemetry: RunTelemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._task: Task
        self._judge: Judge | None = None
        self._failures = FailuresInARow("the reward", config)

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy after its supervised steps."""
        config = self._config
        self._policy, self._folder = policy, folder
        self._task = task = await asyncio.to_thread(task_of, config)
        most = await in_policy_process(CHECK, policy.longest_sequence, folder)
        longest = max(source.longest for source in (task.train, task.held_out) if source is not None)
        if (tokens := longest + config.sampling.max_new_tokens) > most:
            why = f"the longest prompt and sampling.max_new_tokens make {tokens} tokens, and it attends to {most}"
            raise ModelMisfit(policy.name, why, "shorten the prompts, or lower sampling.max_new_tokens")
        self._judge = Judge(reward_of(config, folder.with_name("rewards.log")), task.tokenizer, self._failed)
        await self._judge.start()  # raises what is wrong with the code of the reward
        return warmed_up(policy, config.model, folder)

    async def start(self) -> None:
        """Take the supervised steps, unless an earlier driver did."""
        config, task, folder = self._config, self._task, self._folder
        if not config.model.warmup_steps or folder.exists():
            return
        warm = partial(warm_up, self._policy, config.model, task.problems, task.tokenizer, config.seed, folder)
        await in_policy_process("the supervised steps", warm, folder)

    async def close(self) -> None:
        """End the processes of the reward. Idempotent."""
        if self._judge is not None:
            await self._judge.close()

    def episode(self, policy: Policy, buffer: ReplayBuffer) -> Callable[[], Awaitable[None]]:
        """See `generate_episode`."""
        return partial(self._episode, PromptStream(self._task.train, buffer), policy, buffer)

    async def group(self, number: int, policy: Policy, buffer: ReplayBuffer) -> None:
        """Add the group of a prompt that has begun."""
        await self._episode(_Begun(self._task.train.prompt(number)), policy, buffer)

    async def _episode(self, prompts: Data, policy: Policy, buffer: ReplayBuffer) -> None:
        config = self._config
        settings = (config.sampling, config.seed, config.objective.redraws)
        await generate_episode(prompts, policy, self, buffer, *settings)

    async def evaluate(self, prompt: Prompt, completions: Sequence[Completion], /) -> Group | FailedGroup:
        """The group with rewards. Raises `RunFailed` if it is one of too many that failed."""
        group = await self._judging().evaluate(prompt, completions)
        self._failures.count(group)
        return group

    def held_out(self) -> HeldOut | None:
        """The first held-out prompts."""
        source, wanted = self._task.held_out, self._config.evaluation.prompts
        if source is None:
            return None
        prompts = [source.prompt(number) for number in range(min(wanted or len(source), len(source)))]
        return HeldOutPrompts(self._judging(), prompts, self._config.sampling)

    def status(self) -> tuple[ServiceStatus, ...]:
        """There is no service."""
        return ()

    async def work(self) -> Mapping[str, WorkReport]:
        """There is no process."""
        return {}

    def _judging(self) -> Judge:
        assert self._judge is not None, "`prepare` makes it"
        return self._judge

    def _failed(self, failed: RewardFailed) -> None:
        self._telemetry.emit(EpisodeFailed(time=self._telemetry.now(), prompt=failed.number, reason=str(failed)))


class EnvironmentEpisodes:
    """Episodes that are played in an environment."""

    def __init__(self, config: RunConfig, engine: Engine, telemetry: RunTelemetry) -> None:
        self._config, self._telemetry = config, telemetry
        self._servers = EnvironmentServers(config.environment, engine, telemetry, config.engine.hosts)
        self._games: EnvironmentGames

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy as it is."""
        check = partial(check_name, self._config.environment)
        await in_policy_process("the check of the environment", check, folder)
        self._limit = self._config.environment.max_tokens or await in_policy_process(
            CHECK, policy.longest_sequence, folder
        )
        tokenizer = await asyncio.to_thread(tokenizer_of, self._config)
        self._codec = codec_of(tokenizer, beside_prompts=self._config.has_prompts)
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
        return partial(self._episode, PromptNumbers(buffer), policy, buffer)

    async def group(self, number: int, policy: Policy, buffer: ReplayBuffer) -> None:
        """Play a group that has begun."""
        await self._episode(_Begun(number), policy, buffer)

    async def _episode(self, numbers: GroupNumbers, policy: Policy, buffer: ReplayBuffer) -> None:
        config = self._config
        settings = (config.sampling, config.seed, config.objective.redraws)
        await play_episodes(numbers, policy, self._games, buffer, *settings)

    def held_out(self) -> HeldOut | None:
        """Episodes of other seeds."""
        return HeldOutGames(self._games, self._config.evaluation.prompts, self._config.sampling)

    def status(self) -> tuple[ServiceStatus, ...]:
        """The service of servers, if the run has started any."""
        return self._servers.status()

    async def work(self) -> Mapping[str, WorkReport]:
        """What each server did since the last call."""
        return await self._servers.work()

    def _failed(self, failed: EpisodeFailure) -> None:
        now = self._telemetry.now()
        event = EpisodeFailed(time=now, prompt=failed.number, reason=failed.reason, again=failed.again)
        self._telemetry.emit(event)


class MixedEpisodes:
    """A `share` of the groups is played in an environment, the others begin with prompts. Evaluations have prompts."""

    def __init__(self, prompts: PromptEpisodes, games: EnvironmentEpisodes, share: float) -> None:
        self._prompts, self._games, self._share = prompts, games, share

    async def prepare(self, policy: ModelSource, folder: Path) -> ModelSource:
        """The policy after its supervised steps."""
        source = await self._prompts.prepare(policy, folder)
        await self._games.prepare(policy, folder)  # which has the layers of `source`; that is not saved yet
        return source

    async def start(self) -> None:
        """Take the supervised steps, start the servers, and begin an episode. Raises `UnknownEnvironment`."""
        await all_done(self._prompts.start(), self._games.start())

    async def close(self) -> None:
        """End the servers, and the processes of the reward. Idempotent."""
        await self._games.close()
        await self._prompts.close()

    def episode(self, policy: Policy, buffer: ReplayBuffer) -> Callable[[], Awaitable[None]]:
        """See `generate_episode` and `play_episodes`."""
        numbers = PromptNumbers(buffer)

        async def episode() -> None:
            number = await numbers.sample()
            source = self._games if is_played(number, self._share) else self._prompts
            await source.group(number, policy, buffer)

        return episode

    def held_out(self) -> HeldOut | None:
        """The first held-out prompts."""
        return self._prompts.held_out()

    def status(self) -> tuple[ServiceStatus, ...]:
        """The service of servers, if the run has started any."""
        return self._games.status()

    async def work(self) -> Mapping[str, WorkReport]:
        """What each server did since the last call."""
        return await self._games.work()


def is_played(number: int, share: float) -> bool:
    """Whether a group is one of the `share` that is played in an environment: these are spread evenly."""
    return int((number + 1) * share) > int(number * share)


class _Begun(Generic[T]):
    """A group that has begun already, for what would begin the next one."""

    def __init__(self, group: T) -> None:
        self._group = group

    async def sample(self) -> T:
        """The group."""
        return self._group
