"""The reward that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.rl.config.named_code import load_code
from holdfast.rl.config.run_config import CriterionConfig, RunConfig
from holdfast.rl.rewards.reward import (
    Criterion,
    ExactMatch,
    FormatMatch,
    FunctionReward,
    LengthPenalty,
    Reward,
    Rubric,
)
from holdfast.rl.rewards.reward_processes import RewardProcesses


def reward_of(config: RunConfig, log: Path | None = None) -> Reward | RewardProcesses:
    """The reward of a configuration: one criterion, or the weighted sum of several.

    One with functions or regular expressions of the user's judges in processes, which write to the file `log`.
    """
    bounded = [reward for each in config.reward if (reward := _bounded(each, config)) is not None]
    if len(bounded) == len(config.reward):
        return _rubric(config, bounded)
    return RewardProcesses(partial(make_reward, config), log=log)


async def make_reward(config: RunConfig) -> Reward:
    """Make the reward of a configuration here; its code is imported. Raises `NoSuchCode`, and what that code raises."""
    return _rubric(config, [_bounded(each, config) or _of_the_user(each) for each in config.reward])


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


def _of_the_user(criterion: CriterionConfig) -> Reward:
    match criterion.kind:
        case "exact":
            return ExactMatch(criterion.pattern)
        case "format":
            return FormatMatch(criterion.pattern)
        case "python":
            function: Any = load_code(criterion.function)
            return FunctionReward(criterion.function.rpartition(":")[2], function)
        case "length":
            raise AssertionError("it runs no code of the user's")
