"""Groups of several turns: a toy policy answers, an environment hints, and each turn of a group is one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Completion, Episode, Group, Prompt, SamplingRequest
from holdfast.rl.data.replay_buffer import Batch, FailedGroup, ReplayBuffer, StalenessRule, StepReport
from holdfast.rl.grpo.loop import play_episodes, synchronous
from holdfast.rl.run.evaluation import play_games

SAMPLING = Sampling(group=4, max_new_tokens=1)


class HintedGroup:
    """Sample k has k + 1 turns, with a hint between two of them. The reward is the last token, unless it is `dull`."""

    def __init__(self, number: int, samples: int, dull: bool) -> None:
        self.prompt = Prompt(number=number, tokens=(number + 1,))
        self.drawn: list[list[Completion]] = [[] for _ in range(samples)]
        self._dull = dull

    @property
    def waiting(self) -> Mapping[int, tuple[int, ...]]:
        return {
            place: (*self.prompt.tokens, *(token for each in drawn for token in (*each.tokens, 100)))
            for place, drawn in enumerate(self.drawn)
            if len(drawn) <= place
        }

    async def act(self, completions: Sequence[Completion], /) -> None:
        for place, completion in zip(self.waiting, completions, strict=True):
            self.drawn[place].append(completion)

    def episodes(self) -> Sequence[Episode]:
        return [
            Episode(
                prompt=self.prompt,
                tokens=tuple(token for each in drawn for token in (*each.tokens, 100)),
                logprobs=tuple(value for each in drawn for value in (*each.logprobs, 0.0)),
                versions=tuple(version for each in drawn for version in (*each.versions, 0)),
                mask=(True, False) * len(drawn),
                reward=0.0 if self._dull else float(drawn[-1].tokens[0]),
                finish="stop",
                turns=len(drawn),
            )
            for drawn in self.drawn
        ]

    def result(self) -> Group | FailedGroup:
        if self.prompt.number == 1:
            return FailedGroup(number=1, reasons=("its environment died",))
        return Group(number=self.prompt.number, prompt=self.prompt, episodes=tuple(self.episodes()))


class Hints:
    """Begins such groups; the first `dull` of each number have equal rewards."""

    def __init__(self, dull: int = 0) -> None:
        self.open, self.begun, self._dull = 0, list[int](), dull

    @asynccontextmanager
    async def begin(self, number: int, /) -> AsyncIterator[HintedGroup]:
        self.begun.append(number)
        self.open += 1
        yield HintedGroup(number, SAMPLING.group, dull=self.begun.count(number) <= self._dull)
        self.open -= 1

    @asynccontextmanager
    async def held_out(self, first: int, count: int, /) -> AsyncIterator[HintedGroup]:
        yield HintedGroup(first, count, dull=False)


class SeedPolicy:
    """Draws tokens that are a function of the request; also the trainer of its batches."""

    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []
        self.batches: list[Batch] = []

    async def generate(self, request: SamplingRequest) -> Sequence[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        version = request.version or 0
        return [
            Completion(tokens=(seed % 7,), logprobs=(-1.0,), versions=(version,), finish="length")
            for seed in request.seeds
        ]

    async def step(self, batch: Batch, /) -> StepReport:
        self.batches.append(batch)
        return StepReport(step=batch.step, version=batch.step + 1)


def played(hints: Hints, redraws: int = 0) -> tuple[SeedPolicy, ReplayBuffer]:
    """Two steps of two groups."""

    async def body() -> tuple[SeedPolicy, ReplayBuffer]:
        policy, buffer = SeedPolicy(), ReplayBuffer(StalenessRule(groups=2), patience=30.0)

        async def episode() -> None:
            number = (await buffer.admit()).number
            await play_episodes(number, policy.generate, hints, buffer, SAMPLING, 9, redraws)

        async def serve(version: int) -> None:
            buffer.serve(version)

        await synchronous(episode, buffer, policy.step, serve, range(2))
        return policy, buffer

    return asyncio.run(body())


def test_each_turn_of_a_group_is_one_request_after_all_tokens_before_it() -> None:
    policy, _ = played(Hints())
    assert len(policy.requests) == 5 * SAMPLING.group, "of four groups that are trained, and one that failed"
    known = {prompt for request in policy.requests for prompt in request.prompts}
    for batch in policy.batches:
        for group in batch.groups:
            for episode in group.episodes:
                assert (*episode.prompt.tokens, *episode.tokens[:-2]) in known
    seeds = [seed for request in policy.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds), "each sample has a seed of its own in each turn"


def test_what_is_drawn_depends_on_the_seed_the_numbers_and_what_was_seen_alone() -> None:
    first, second = played(Hints())[0], played(Hints())[0]
    assert first.batches == second.batches
    assert sorted(first.requests, key=repr) == sorted(second.requests, key=repr)


def test_a_group_that_failed_is_counted_and_another_takes_its_place() -> None:
    """Tokens are drawn with the version of the step. Those of the environment have 0, which does not count."""
    hints = Hints()
    policy, buffer = played(hints)
    assert [[group.number for group in batch.groups] for batch in policy.batches] == [[0, 2], [3, 4]]
    assert buffer.state().failed == 1
    assert hints.open == 0 and len(hints.begun) == 5
    assert [[group.version for group in batch.groups] for batch in policy.batches] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("redraws, times", [(0, 1), (1, 2), (5, 3)])
def test_a_group_that_teaches_nothing_is_played_again(redraws: int, times: int) -> None:
    hints = Hints(dull=2)
    played(hints, redraws)
    assert hints.begun.count(0) == times


def test_held_out_episodes_are_played_greedily_as_many_at_a_time_as_a_group_has() -> None:
    policy = SeedPolicy()
    result = asyncio.run(play_games(policy.generate, Hints(), 10, SAMPLING, 3))
    assert len(result.rewards) == 10 and result.failed == 0
    assert set(result.versions) == {3} and {request.temperature for request in policy.requests} == {0.0}
    assert max(len(request.prompts) for request in policy.requests) == SAMPLING.group
