"""The reward that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.data.episode import Prompt
from holdfast.rl.data.errors import BadDataset
from holdfast.rl.rewards.ensemble import Verifier, WeakVerifierEnsemble
from holdfast.rl.rewards.reward import (
    Criterion,
    ExactMatch,
    FormatMatch,
    FunctionReward,
    JudgedAnswer,
    LengthPenalty,
    Reward,
    Rubric,
)
from holdfast.rl.rewards.reward_processes import RewardProcesses


class _AnswerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that was drawn for a prompt, whether it is right or not."""

    prompt: str
    text: str
    answer: str = ""


def reward_of(config: RunConfig, log: Path | None = None) -> Reward | RewardProcesses:
    """The reward of a configuration: one criterion, or the weighted sum of several.

    One with functions or regular expressions of the user's judges in processes, which write to the file `log`.
    """
    bounded = [reward for each in config.reward if (reward := _bounded(each, config)) is not None]
    if len(bounded) == len(config.reward):
        return _rubric(config, bounded)
    return RewardProcesses(partial(make_reward, config), log=log)


async def make_reward(config: RunConfig) -> Reward:
    """Make the reward of a configuration here; its code is imported.

    Raises `NoSuchCode`, and for an ensemble `BadDataset` and `NotIdentifiable`.
    """
    return _rubric(config, [_bounded(each, config) or await _of_the_user(each) for each in config.reward])


def _rubric(config: RunConfig, rewards: Sequence[Reward]) -> Rubric:
    several = len(rewards) > 1
    return Rubric(
        [
            Criterion(f"{each.kind}-{number}" if several else each.kind, each.weight, reward)
            for number, (each, reward) in enumerate(zip(config.reward, rewards, strict=True))
        ]
    )


def _bounded(criterion: CriterionConfig, config: RunConfig) -> Reward | None:
    """The reward of a criterion that runs no code of the user's; None for any other."""
    if criterion.kind == "exact" and not criterion.pattern:
        return ExactMatch()
    if criterion.kind == "length":
        most = config.sampling.max_new_tokens
        return LengthPenalty(most, criterion.margin or most)
    return None


async def _of_the_user(criterion: CriterionConfig) -> Reward:
    match criterion.kind:
        case "exact":
            return ExactMatch(criterion.pattern)
        case "format":
            return FormatMatch(criterion.pattern)
        case "python":
            return _function(criterion.function)
        case "ensemble":
            verifiers = [Verifier(_function(each)) for each in criterion.verifiers]
            return await WeakVerifierEnsemble.calibrated(verifiers, read_answers(Path(criterion.answers)))
        case "length":
            raise AssertionError("it runs no code of the user's")


def _function(code: str) -> Reward:
    function: Any = load_code(code)
    return FunctionReward(code.rpartition(":")[2], function)


def read_answers(path: Path) -> list[JudgedAnswer]:
    """The answers of a file with a `{"prompt", "answer", "text"}` a line. Raises `BadDataset`."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadDataset(str(path), None, f"cannot be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            each = msgspec.json.decode(line, type=_AnswerLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadDataset(str(path), number, f'not a line of {{"prompt", "answer", "text"}}: {error}') from None
        prompt = Prompt(number=number, tokens=(0,), text=each.prompt, answer=each.answer)
        found.append(JudgedAnswer(prompt=prompt, text=each.text, length=len(each.text)))
    return found
