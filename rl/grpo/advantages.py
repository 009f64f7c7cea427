"""Advantages of episodes within their groups, as exact sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.rl.config.run_config import Objective
from holdfast.rl.data.episode import MOST_REWARD, is_usable_reward
from holdfast.rl.data.errors import InvalidEpisode


def advantages(groups: Sequence[Sequence[float]], objective: Objective) -> tuple[float, ...]:
    """The advantages of the episodes of a batch, from the rewards of each of its groups.

    They are 0 where a whole group is alike. Sums are exact, so the order of the rewards changes no bit. Raises
    `InvalidEpisode` for a reward that `is_usable_reward` refuses: all advantages are finite, in float32 too.
    """
    for number, rewards in enumerate(groups):
        bounded = min(rewards) >= -MOST_REWARD and max(rewards) <= MOST_REWARD
        if not bounded or math.isnan(math.fsum(rewards)):  # a NaN may escape min and max
            wrong = next(each for each in rewards if not is_usable_reward(each))
            raise InvalidEpisode("Group", number, f"its reward {wrong} is not finite, or beyond {MOST_REWARD:g}")
    shared = 1.0 if objective.scale_rewards == "none" else 0.0  # 0: each group has a scale of its own
    if objective.scale_rewards == "batch":
        shared = _deviation([each for rewards in groups for each in rewards])
    found: list[float] = []
    for rewards in groups:
        if max(rewards) == min(rewards):
            found += [0.0] * len(rewards)
            continue
        mean, scale = math.fsum(rewards) / len(rewards), shared or _deviation(rewards)
        found += [(reward - mean) / scale for reward in rewards]
    return tuple(found)


def _deviation(rewards: Sequence[float]) -> float:
    """What advantages are divided by: the unbiased standard deviation, and 1e-4."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum([(each - mean) ** 2 for each in rewards]) / max(len(rewards) - 1, 1)) + 1e-4
