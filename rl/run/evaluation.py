"""Held-out evaluation: beside training, with the best version kept, and of saved weights as the run itself does it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData, HoldfastError
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.config.run_config import EngineConfig, RunConfig, Sampling
from holdfast.rl.data.episode import Episode, Prompt
from holdfast.rl.environments.play import EnvironmentGames, EpisodeFailure, LineCodec, places
from holdfast.rl.errors import OtherVersion, RewardFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.grpo.loop import Generate
from holdfast.rl.rewards.judge import Judge, reward_of
from holdfast.rl.run.environment_servers import EnvironmentServers
from holdfast.rl.run.policy import Task, task_of, tokenizer_of
from holdfast.rl.run.run_events import Evaluated
from holdfast.rl.run.services import RunServices
from holdfast.store import Lease, WeightStore
from holdfast.store.interop.safetensors import export_version

COMPARABLE = 0.1
"""The share of episodes that one evaluation may have judged more than another, if their rewards are to be compared."""


def is_better(score: Evaluated, best: Evaluated | None) -> bool:
    """Whether a version is the best one from now on.

    Between evaluations that judged about as many episodes, the reward decides; else the one that judged more wins.
    """
    if score.reward is None or best is None or best.reward is None:
        return score.reward is not None
    more = (best.failed - score.failed) / (score.judged + score.failed)
    return more > 0 if abs(more) > COMPARABLE else score.reward > best.reward


class NothingHeldOut(HoldfastError):
    """A configuration has no held-out prompts that answers can be judged by."""


class HeldOutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the reference, and what the model answered; `failure` says why there is no reward.

    In an environment the prompt is what it showed first, and the answer is all that followed.
    """

    prompt: str = ""
    reference: str = ""
    answer: str = ""
    reward: float = 0.0
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    failure: str = ""


class HeldOutResult(msgspec.Struct, frozen=True):
    """Held-out prompts or episodes that were played, and the versions of all tokens that the policy drew."""

    answers: tuple[HeldOutAnswer, ...]
    versions: tuple[int, ...] = ()

    @property
    def judged(self) -> list[HeldOutAnswer]:
        """Those that have a reward."""
        return [each for each in self.answers if not each.failure]

    @property
    def reward(self) -> float | None:
        """The mean of the rewards; None if nothing was judged."""
        return fmean(each.reward for each in self.judged) if self.judged else None


def held_out_prompts(config: RunConfig, task: Task, count: int = 0) -> tuple[Prompt, ...]:
    """The first `count` held-out prompts (0: all of them), as a run evaluates them. Raises `NothingHeldOut`."""
    if not config.has_prompts:
        raise NothingHeldOut(f"the run plays in {config.environment.name!r}, and has no prompts")
    if task.held_out is None:
        raise NothingHeldOut("the configuration has no held-out prompts: name a file of them in data.held_out")
    if not config.reward:
        raise NothingHeldOut("the configuration has no [[reward]] to judge answers to held-out prompts by: add one")
    most = len(task.held_out)
    return tuple(task.held_out.prompt(number) for number in range(min(count or most, most)))


async def play_prompts(
    generate: Generate, judge: Judge, prompts: Sequence[Prompt], sampling: Sampling, version: int | None
) -> HeldOutResult:
    """The likeliest completions of held-out prompts under a version (None: what serves), judged by the reward."""
    completions = await generate(sampling.greedy((each.tokens for each in prompts), version))
    answers = []
    for prompt, completion, score in zip(prompts, completions, await judge.scores(prompts, completions), strict=True):
        answer = HeldOutAnswer(prompt=prompt.text, reference=prompt.answer, answer=judge.text(completion))
        if isinstance(score, RewardFailed):
            answers.append(msgspec.structs.replace(answer, failure=score.reason))
        else:
            answers.append(msgspec.structs.replace(answer, reward=score.value, parts=score.parts))
    return HeldOutResult(tuple(answers), tuple(each for drawn in completions for each in drawn.versions))


async def play_games(
    generate: Generate,
    games: EnvironmentGames,
    count: int,
    sampling: Sampling,
    version: int | None,
    decode: Callable[[tuple[int, ...]], str],
    failures: Sequence[str] = (),
) -> HeldOutResult:
    """`count` greedy held-out episodes of an environment, as many at a time as a group has.

    `failures` has by the end why some of them failed, as far as anyone has said.
    """

    async def part(first: int) -> Sequence[Episode]:
        async with games.held_out(first, min(sampling.group, count - first)) as game:
            while waiting := game.waiting:
                await game.act(await generate(sampling.greedy(waiting.values(), version)))
            return game.episodes()

    found = [each for some in await asyncio.gather(*map(part, range(0, count, sampling.group))) for each in some]
    answers = [HeldOutAnswer(prompt=each.prompt.text, answer=decode(each.tokens), reward=each.reward) for each in found]
    unsaid = ["the policy drew no token"] * (count - len(found) - len(failures))
    answers += [HeldOutAnswer(failure=why) for why in (*failures, *unsaid)]
    drawn = [v for each in found for v, mine in zip(each.versions, each.mask, strict=True) if mine]
    return HeldOutResult(tuple(answers), tuple(drawn))


class HeldOutEvaluation:
    """Evaluates every `every`-th version, which must be served until the evaluation has settled; 0: none.

    One runs at a time. `play` plays all held-out episodes greedily, under exactly a version. `on_score` is called with
    each score; `best` is the best so far, also of a run that this one continues. `now` is the clock of the run.
    """

    def __init__(
        self,
        play: Callable[[int], Awaitable[HeldOutResult]],
        every: int,
        kept: BestVersion,
        on_score: Callable[[Evaluated], None] = lambda score: None,
        best: Evaluated | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.best = best
        self._play, self._every, self._kept, self._on_score, self._now = play, every, kept, on_score, now
        self._running: asyncio.Task[None] | None = None

    async def begin(self, version: int) -> None:
        """Begin to evaluate `version` if it is due."""
        if self._every and version % self._every == 0:
            await self.settle()
            self._running = asyncio.create_task(self._evaluate(version, await self._kept.hold(version)))

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

    async def _evaluate(self, version: int, held: Lease) -> None:
        played = await self._play(version)
        if others := set(played.versions) - {version}:
            raise OtherVersion(version, sorted(others))
        reward, judged = played.reward, len(played.judged)
        failed = len(played.answers) - judged
        score = Evaluated(time=0.0, version=version, reward=reward, judged=judged, failed=failed, best=False)
        if reward is not None and is_better(score, self.best):
            await self._kept.keep_best(version, reward)
            self.best = score = msgspec.structs.replace(score, best=True)
        await asyncio.to_thread(held.release)
        self._on_score(msgspec.structs.replace(score, time=self._now()))


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
    except UNDECODABLE as error:
        raise CorruptData(f"{record} is no record of a best version: {error}; delete it") from error


class BestVersion:
    """Holds versions of a store while they are evaluated, and keeps the best one in `directory`.

    The record there names the best one's folder, which is whole; another run may go on from it. Raises `CorruptData`
    for a record that cannot be read.
    """

    def __init__(self, store: WeightStore, directory: Path, source: ModelSource) -> None:
        self._store, self._directory, self._source = store, directory, source
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._best = read_best(directory)

    @property
    def folder(self) -> Path | None:
        """The folder of the best version."""
        return None if self._best is None else self._directory / self._best.folder

    async def hold(self, version: int) -> Lease:
        """Wait for a version; the store keeps it until the lease is released. Raises the store's errors."""
        await asyncio.to_thread(self._store.wait, version, STORE_SECONDS)
        return await asyncio.to_thread(self._store.pin, version)

    async def keep_best(self, version: int, reward: float) -> None:
        """Write a held version to disk as the best one, instead of the one before."""
        await asyncio.to_thread(self._keep, version, reward)

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


class VersionEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of the judged held-out prompts, and of each part of it; None if none was judged."""

    reward: float | None
    parts: Mapping[str, float]
    failed: int
    tokens: int
    seconds: float
    answers: tuple[HeldOutAnswer, ...]


async def evaluate_source(config: RunConfig, source: ModelSource, count: int = 0) -> VersionEvaluation:
    """Evaluate the weights of `source` on `count` held-out prompts or episodes (0: as many as the run does).

    Raises `NothingHeldOut`, `BadDataset`, `UnknownEnvironment`, and the errors of a generator.
    """
    count = count or config.evaluation.prompts
    if not config.has_prompts and not count:
        raise NothingHeldOut("the configuration does not say how many episodes to play: give a number")
    if config.has_prompts:
        task = task_of(config)
        prompts = held_out_prompts(config, task, count)
    began = time.perf_counter()
    generator = TransformersGenerator(source, None, config)
    try:
        if config.has_prompts:
            judge = Judge(reward_of(config), task.tokenizer)
            try:
                await judge.start()
                played = await play_prompts(generator.generate, judge, prompts, config.sampling, None)
            finally:
                await judge.close()
        else:
            played = await _played_here(config, source, count, generator.generate)
    finally:
        generator.close()
    judged = played.judged
    parts = sorted({name for each in judged for name in each.parts})
    return VersionEvaluation(
        reward=played.reward,
        parts={name: fmean(each.parts.get(name, 0.0) for each in judged) for name in parts},
        failed=len(played.answers) - len(judged),
        tokens=len(played.versions),
        seconds=time.perf_counter() - began,
        answers=played.answers,
    )


async def _played_here(config: RunConfig, source: ModelSource, count: int, generate: Generate) -> HeldOutResult:
    """Play at the addresses of the configuration, or else at a server that is started for it."""
    failures: list[str] = []

    def failed(failure: EpisodeFailure) -> None:
        if not failure.again:
            failures.append(failure.reason)

    environment = config.environment
    sessions = max(places(environment), config.sampling.group)
    here = msgspec.structs.replace(environment, servers=0 if environment.addresses else 1, sessions=sessions)
    config = msgspec.structs.replace(config, environment=here, engine=EngineConfig())  # on this host
    tokenizer = tokenizer_of(config)
    limit = environment.max_tokens or source.longest_sequence()
    async with LocalEngine() as engine:
        services = RunServices(config, engine)
        servers = EnvironmentServers(config, services)
        try:
            codec = LineCodec(tokenizer, beside_prompts=False)
            games = EnvironmentGames(await servers.start(), codec, config, limit, failed)
            return await play_games(generate, games, count, config.sampling, None, tokenizer.decode, failures)
        finally:
            await servers.close()
            await services.close()
