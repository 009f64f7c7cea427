"""Evaluates saved weights on the held-out prompts of a configuration, by the run's own generator and reward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.rl.algorithms.evaluation import judged
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.episode import Completion, Prompt, SamplingRequest
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.generators.transformers_generator import TransformersGenerator
from holdfast.rl.rewards.configured_reward import reward_of
from holdfast.rl.rewards.errors import RewardFailed
from holdfast.rl.rewards.reward import Judge, Score
from holdfast.rl.run.generation import generator_settings
from holdfast.rl.run.policy_source import Task, task_of


class NothingHeldOut(HoldfastError):
    """A configuration has no held-out prompts that answers can be judged by."""


class HeldOutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the reference, and what the model answered; `failure` says why there is no reward."""

    prompt: str
    reference: str
    answer: str
    reward: float = 0.0
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    failure: str = ""


class VersionEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of held-out prompts, and of each part of the reward. Failed episodes count 0."""

    reward: float
    parts: Mapping[str, float]
    failed: int
    tokens: int
    seconds: float
    answers: tuple[HeldOutAnswer, ...]


class _OneGenerator:
    """A generator in this process, as the endpoint of a policy."""

    def __init__(self, generator: TransformersGenerator) -> None:
        self._generator = generator

    async def route(self, request: SamplingRequest) -> Sequence[Completion]:
        """The completions of a request."""
        return await self._generator.generate(request)


def held_out_prompts(config: RunConfig, task: Task, count: int = 0) -> tuple[Prompt, ...]:
    """The first `count` held-out prompts (0: all of them), as a run evaluates them. Raises `NothingHeldOut`."""
    if config.environment.name:
        why = f"the run plays {config.environment.name!r}: it is evaluated while it trains, and not by this command"
        raise NothingHeldOut(why)
    if task.held_out is None:
        raise NothingHeldOut("the configuration has no held-out prompts: name a file of them in data.held_out")
    if not config.reward:
        raise NothingHeldOut("the configuration has no [[reward]] to judge answers to held-out prompts by: add one")
    most = len(task.held_out)
    return tuple(task.held_out.prompt(number) for number in range(min(count or most, most)))


async def evaluate_source(config: RunConfig, source: ModelSource, count: int = 0) -> VersionEvaluation:
    """Evaluate the weights of `source` on `count` held-out prompts (0: as many as the run does).

    Raises `NothingHeldOut`, `BadDataset`, and the errors of a generator.
    """
    if config.environment.name:
        raise NothingHeldOut(f"environment {config.environment.name} plays in a run alone: see its evaluations there")
    task = task_of(config)
    prompts = held_out_prompts(config, task, count or config.evaluation.prompts)
    judge = Judge(await reward_of(config), task.tokenizer)
    settings = generator_settings(config)
    generator = TransformersGenerator(source, None, settings)
    began = time.perf_counter()
    answers: list[HeldOutAnswer] = []
    tokens = 0
    try:
        for at in range(0, len(prompts), settings.slots):
            some = prompts[at : at + settings.slots]
            completions, scores = await judged(_OneGenerator(generator), judge, some, config.sampling, None)
            tokens += sum(len(each.tokens) for each in completions)
            for prompt, completion, score in zip(some, completions, scores, strict=True):
                answers.append(_answer(prompt, judge.text(completion), score))
    finally:
        generator.close()
    parts = sorted({name for each in answers for name in each.parts})
    return VersionEvaluation(
        reward=_mean([each.reward for each in answers]),
        parts={name: _mean([each.parts.get(name, 0.0) for each in answers]) for name in parts},
        failed=sum(bool(each.failure) for each in answers),
        tokens=tokens,
        seconds=time.perf_counter() - began,
        answers=tuple(answers),
    )


def _answer(prompt: Prompt, text: str, score: Score | RewardFailed) -> HeldOutAnswer:
    if isinstance(score, Score):
        return HeldOutAnswer(
            prompt=prompt.text, reference=prompt.answer, answer=text, reward=score.value, parts=score.parts
        )
    return HeldOutAnswer(prompt=prompt.text, reference=prompt.answer, answer=text, failure=score.reason)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
