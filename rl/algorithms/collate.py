"""Groups as padded tensors for a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.rl.algorithms.grpo import StepTotals, advantages
from holdfast.rl.config.objective import Objective
from holdfast.rl.data.episode import Episode, Group
from holdfast.rl.kernels import LossInputs

_Row = list[int] | list[float] | list[bool]


@dataclass(frozen=True, slots=True)
class TrainingTokens:
    """Episodes padded on the right, a row each: `tokens` (n, length) with their prompts, and `attention` (n, length).

    Column c of `inputs` and of log-probabilities belongs to the token in column c + 1: they have one column less.
    """

    tokens: torch.Tensor
    attention: torch.Tensor
    inputs: LossInputs


def collate(groups: Sequence[Group], objective: Objective) -> TrainingTokens:
    """The episodes of `groups` as tensors on the CPU."""
    rows = [
        (episode, advantage)
        for group in groups
        for episode, advantage in zip(
            group.episodes, advantages([each.reward for each in group.episodes], objective), strict=True
        )
    ]
    width = max(len(episode.prompt.tokens) + len(episode.tokens) for episode, _ in rows)
    tokens, attention, mask, generated = list[_Row](), list[_Row](), list[_Row](), list[_Row]()
    for episode, _ in rows:
        before, many = len(episode.prompt.tokens), len(episode.tokens)
        after = width - before - many
        tokens.append([*episode.prompt.tokens, *episode.tokens, *[0] * after])
        attention.append([*[True] * (before + many), *[False] * after])
        mask.append([*[False] * (before - 1), *counted_tokens(episode, objective), *[False] * after])
        generated.append([*[0.0] * (before - 1), *episode.logprobs, *[0.0] * after])
    return TrainingTokens(
        torch.tensor(tokens, dtype=torch.int64, device="cpu"),
        torch.tensor(attention, dtype=torch.bool, device="cpu"),
        LossInputs(
            torch.tensor(mask, dtype=torch.bool, device="cpu"),
            torch.tensor([advantage for _, advantage in rows], dtype=torch.float32, device="cpu"),
            torch.tensor(generated, dtype=torch.float32, device="cpu"),
        ),
    )


def step_totals(groups: Sequence[Group], objective: Objective) -> StepTotals:
    """The totals of all groups of a step, whichever unit each is in."""
    episodes = [each for group in groups for each in group.episodes]
    tokens = sum(sum(counted_tokens(each, objective)) for each in episodes)
    return StepTotals(sequences=len(episodes), tokens=max(tokens, 1))


def counted_tokens(episode: Episode, objective: Objective) -> tuple[bool, ...]:
    """Which tokens of an episode count in the loss."""
    if objective.skip_overlong and episode.finish == "length":
        return (False,) * len(episode.mask)
    return episode.mask
