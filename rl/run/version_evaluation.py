"""Evaluates saved weights on the held-out prompts or episodes of a configuration, as the run itself does."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.config.run_config import EngineConfig, RunConfig, Sampling
from holdfast.rl.data.episode import Prompt
from holdfast.rl.environments.play import EnvironmentGames, EpisodeFailure, LineCodec, places
from holdfast.rl.errors import RewardFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.grpo.loop import Generate
from holdfast.rl.rewards.judge import Judge, reward_of
from holdfast.rl.rewards.reward import Score
from holdfast.rl.run.environment_servers import EnvironmentServers
from holdfast.rl.run.evaluation import held_out_episodes, judged
from holdfast.rl.run.policy import Task, task_of, tokenizer_of
from holdfast.rl.run.services import RunServices


class NothingHeldOut(HoldfastError):
    """A configuration has no held-out prompts that answers can be judged by."""


class HeldOutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the reference, and what the model answered; `failure` says why there is no reward.

    In an environment the prompt is what it showed first, and the answer is all that followed.
    """

    prompt: str
    reference: str
    answer: str
    reward: float = 0.0
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    failure: str = ""


class VersionEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of the judged held-out prompts, and of each part of it; None if none was judged."""

    reward: float | None
    parts: Mapping[str, float]
    failed: int
    tokens: int
    seconds: float
    answers: tuple[HeldOutAnswer, ...]


_Answers = tuple[list[HeldOutAnswer], int]
"""Answers, and the number of tokens that the model drew for them."""


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


async def evaluate_source(config: RunConfig, source: ModelSource, count: int = 0) -> VersionEvaluation:
    """Evaluate the weights of `source` on `count` held-out prompts or episodes (0: as many as the run does).

    Raises `NothingHeldOut`, `BadDataset`, `UnknownEnvironment`, and the errors of a generator.
    """
    count = count or config.evaluation.prompts
    work: Callable[[Generate], Awaitable[_Answers]]
    if config.has_prompts:
        task = task_of(config)
        prompts = held_out_prompts(config, task, count)
        judge = Judge(reward_of(config), task.tokenizer)
        work = partial(_judged_answers, judge, prompts, config.sampling, config.sampling.slots)
    elif count:
        work = partial(_played_answers, config, source, count)
    else:
        raise NothingHeldOut("the configuration does not say how many episodes to play: give a number")
    began = time.perf_counter()
    generator = TransformersGenerator(source, None, config)
    try:
        answers, tokens = await work(generator.generate)
    finally:
        generator.close()
    scored = [each for each in answers if not each.failure]
    parts = sorted({name for each in scored for name in each.parts})
    return VersionEvaluation(
        reward=_mean([each.reward for each in scored]) if scored else None,
        parts={name: _mean([each.parts.get(name, 0.0) for each in scored]) for name in parts},
        failed=len(answers) - len(scored),
        tokens=tokens,
        seconds=time.perf_counter() - began,
        answers=tuple(answers),
    )


async def _judged_answers(
    judge: Judge, prompts: Sequence[Prompt], sampling: Sampling, slots: int, generate: Generate
) -> _Answers:
    answers: list[HeldOutAnswer] = []
    tokens = 0
    async with judge:
        for at in range(0, len(prompts), slots):
            some = prompts[at : at + slots]
            completions, scores = await judged(generate, judge, some, sampling, None)
            tokens += sum(len(each.tokens) for each in completions)
            for prompt, completion, score in zip(some, completions, scores, strict=True):
                answers.append(_answer(prompt, judge.text(completion), score))
    return answers, tokens


async def _played_answers(config: RunConfig, source: ModelSource, count: int, generate: Generate) -> _Answers:
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
            episodes = await held_out_episodes(generate, games, count, config.sampling, None)
        finally:
            await servers.close()
            await services.close()
    answers = [
        HeldOutAnswer(prompt=each.prompt.text, reference="", answer=tokenizer.decode(each.tokens), reward=each.reward)
        for each in episodes
    ]
    unsaid = ["the policy drew no token"] * (count - len(episodes) - len(failures))
    answers += [HeldOutAnswer(prompt="", reference="", answer="", failure=why) for why in (*failures, *unsaid)]
    return answers, sum(sum(each.mask) for each in episodes)


def _answer(prompt: Prompt, text: str, score: Score | RewardFailed) -> HeldOutAnswer:
    if isinstance(score, Score):
        return HeldOutAnswer(
            prompt=prompt.text, reference=prompt.answer, answer=text, reward=score.value, parts=score.parts
        )
    return HeldOutAnswer(prompt=prompt.text, reference=prompt.answer, answer=text, failure=score.reason)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
