"""Groups of several turns: the policy and an environment in turns, instead of a completion and a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from holdfast.rl.algorithms.episode import teaches
from holdfast.rl.algorithms.evaluation import HeldOutResult
from holdfast.rl.algorithms.protocols import Buffer, Generation, Policy
from holdfast.rl.config.sampling import Sampling
from holdfast.rl.data.episode import Completion, Episode, Group
from holdfast.rl.data.replay_buffer import FailedGroup


class GroupNumbers(Protocol):
    """The numbers of a run's groups, each once."""

    async def sample(self) -> int:
        """The next number, once its group may begin."""
        ...


class GroupInPlay(Protocol):
    """The episodes of one group, which begin with the same prompt and are played turn by turn together."""

    @property
    def waiting(self) -> Mapping[int, tuple[int, ...]]:
        """All tokens so far of each episode that waits for the policy, by its place in the group."""
        ...

    async def act(self, completions: Sequence[Completion], /) -> None:
        """Take a turn of the policy in each episode of `waiting`, in that order."""
        ...

    def episodes(self) -> Sequence[Episode]:
        """The episodes that did not fail, once nothing is waiting."""
        ...

    def result(self) -> Group | FailedGroup:
        """The group of these episodes."""
        ...


class Games(Protocol):
    """Begins the groups of a run."""

    def begin(self, number: int, /) -> AbstractAsyncContextManager[GroupInPlay]:
        """Play the group of a number; what follows depends on the number and the policy alone."""
        ...

    def held_out(self, first: int, count: int, /) -> AbstractAsyncContextManager[GroupInPlay]:
        """Play episodes that no group has, each from a prompt of its own."""
        ...


class HeldOutGames:
    """Held-out episodes of an evaluation, `count` of them, as many at a time as a group has."""

    def __init__(self, games: Games, count: int, sampling: Sampling) -> None:
        self._games, self._count, self._sampling = games, count, sampling

    async def play(self, policy: Policy, version: int) -> HeldOutResult:
        """See `HeldOut`."""
        found = await self.episodes(policy.generate, version)
        drawn = [v for each in found for v, mine in zip(each.versions, each.mask, strict=True) if mine]
        return HeldOutResult(
            rewards=tuple(each.reward for each in found), failed=self._count - len(found), versions=tuple(drawn)
        )

    async def episodes(self, generation: Generation, exact: int | None) -> list[Episode]:
        """The episodes, without those that failed."""
        starts = range(0, self._count, self._sampling.group)
        parts = await asyncio.gather(*(self._part(generation, exact, at) for at in starts))
        return [each for part in parts for each in part]

    async def _part(self, generation: Generation, exact: int | None, first: int) -> Sequence[Episode]:
        async with self._games.held_out(first, min(self._sampling.group, self._count - first)) as game:
            while waiting := game.waiting:
                request = self._sampling.greedy_turn(tuple(waiting.values()), exact)
                await game.act(await generation.route(request))
            return game.episodes()


async def play_episodes(
    numbers: GroupNumbers, policy: Policy, games: Games, buffer: Buffer, sampling: Sampling, seed: int, redraws: int = 0
) -> None:
    """Add the group of the next number to the buffer, as `generate_episode` does, after as many turns as it takes."""
    number, version = await numbers.sample(), buffer.required_version
    for draw in range(redraws + 1):
        async with games.begin(number) as game:
            while waiting := game.waiting:
                request = sampling.turn(seed, number, draw, waiting, version)
                await game.act(await policy.generate.route(request))
            group = game.result()
        if teaches(group):
            break
    await buffer.add(group)
