"""Both loops over services in memory: a toy policy learns, generation overlaps training, and groups take turns."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean as mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Completion, Prompt, SamplingRequest
from holdfast.rl.data.prompts import CharacterTokenizer, Problem, PromptSource
from holdfast.rl.data.replay_buffer import Batch, BufferState, ReplayBuffer, StalenessRule, StepReport
from holdfast.rl.environments.environment import Observation
from holdfast.rl.environments.play import EpisodePlay, GameInPlay
from holdfast.rl.errors import EnvironmentDied, OtherVersion
from holdfast.rl.grpo.batch import BatchColumns, collate
from holdfast.rl.grpo.loop import asynchronous, generate_episode, play_episodes, running, synchronous
from holdfast.rl.grpo.loss import loss
from holdfast.rl.rewards.judge import Judge
from holdfast.rl.rewards.reward import Criterion, ExactMatch, JudgedAnswer, Rubric
from holdfast.rl.run.evaluation import HeldOutAnswer, HeldOutEvaluation, HeldOutResult, play_games, play_prompts
from holdfast.rl.run.run_events import Evaluated
from support.rl.small_batches import completion, objective
from support.source_tree import ROOT

TOKENIZER = CharacterTokenizer()
EXACT = Rubric([Criterion("exact", 1.0, ExactMatch())])
PROBLEMS = [Problem(f"{digit}=", f"{digit}") for digit in range(4)]
SAMPLING = Sampling(group=8, max_new_tokens=1)
OBJECTIVE = objective("grpo")


@dataclass
class ToyCluster:
    """The policy and its trainer. The policy draws one character: a table of logits for each first token of a prompt.

    With `overlap`, a step lasts until something was generated meanwhile.
    """

    overlap: bool = False
    served: int = 0
    training: bool = False
    generated_during_steps: int = 0
    versions: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(14, 14)])
    batches: list[Batch] = field(default_factory=list)
    requests: list[SamplingRequest] = field(default_factory=list)
    generation: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(self, request: SamplingRequest) -> Sequence[Completion]:
        self.requests.append(request)
        self.generated_during_steps += self.training
        version = self.served
        assert request.version in (None, version)
        for _ in range(10):
            await asyncio.sleep(0)
        self.generation.set()
        drawn = []
        for sample, seed in enumerate(request.seeds):
            logprobs = self.versions[version][request.prompts[sample // request.samples][0]].log_softmax(-1)
            if request.temperature == 0:
                token = int(logprobs.argmax())
            else:
                token = int(torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(seed)))
            drawn.append(completion((token,), version, "length", float(logprobs[token])))
        return drawn

    async def switch(self, version: int) -> None:
        await asyncio.sleep(0)
        self.served = version

    async def step(self, batch: Batch) -> StepReport:
        async with self.turn:
            return await self.train(batch)

    async def train(self, batch: Batch) -> StepReport:
        self.training = True
        self.generation.clear()
        if self.overlap:
            async with asyncio.timeout(30.0):
                await self.generation.wait()
        else:
            for _ in range(20):
                await asyncio.sleep(0)
        table = self.versions[-1].clone().requires_grad_()
        made = collate(BatchColumns.of(batch.groups), OBJECTIVE)
        predicted = table[made.tokens[:, 0]].log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
        logprobs = predicted.gather(2, made.tokens[:, 1:].unsqueeze(2)).squeeze(2)
        (gradient,) = torch.autograd.grad(loss(logprobs, made.inputs.generated, made.inputs, OBJECTIVE), table)
        self.versions.append(table.detach() - 8.0 * gradient)
        self.batches.append(batch)
        self.training = False
        return StepReport(step=batch.step, version=batch.step + 1)

    def rewards(self) -> list[float]:
        """The mean reward of each batch."""
        return [mean(each.reward for group in batch.groups for each in group.episodes) for batch in self.batches]


async def train(
    cluster: ToyCluster,
    steps: range,
    bound: int = 0,
    state: BufferState | None = None,
    reward: Rubric = EXACT,
    evaluation: HeldOutEvaluation | None = None,
    redraws: int = 0,
) -> ReplayBuffer:
    """One run of either loop; `bound` 0 is the synchronous one."""
    rule = StalenessRule(groups=4, bound=bound)
    buffer = ReplayBuffer(rule, patience=30.0) if state is None else ReplayBuffer.from_state(state, patience=30.0)
    prompts = PromptSource(PROBLEMS, TOKENIZER, seed=1)

    async def serve(version: int) -> None:
        if evaluation is not None:
            await evaluation.settle()
        await cluster.switch(version)
        buffer.serve(version)
        if evaluation is not None:
            await evaluation.begin(version)

    judge = Judge(reward, TOKENIZER)

    async def episode() -> None:
        prompt = prompts.prompt((await buffer.admit()).number)
        await generate_episode(prompt, cluster.generate, judge.evaluate, buffer, SAMPLING, 5, redraws)

    if evaluation is not None:
        await evaluation.begin(steps.start)
    if bound:
        await asynchronous(episode, buffer, cluster.step, serve, steps, concurrency=6)
    else:
        await synchronous(episode, buffer, cluster.step, serve, steps)
    if evaluation is not None:
        await evaluation.settle()
    return buffer


async def test_the_asynchronous_loop_generates_and_switches_beside_steps_and_the_synchronous_does_not() -> None:
    class Switching(ToyCluster):
        """A switch of the policy lasts until the next step has begun."""

        async def switch(self, version: int) -> None:
            async with asyncio.timeout(30.0):
                while version < 6 and not (self.training and len(self.versions) == version + 1):
                    await asyncio.sleep(0)
            await super().switch(version)

    alone, overlapped = ToyCluster(), Switching(overlap=True)
    await train(alone, range(6))
    await train(overlapped, range(6), bound=2)
    assert (alone.served, overlapped.served) == (6, 6)
    assert alone.generated_during_steps == 0
    assert overlapped.generated_during_steps >= 6
    assert all(batch.step - group.version <= 2 for batch in overlapped.batches for group in batch.groups)


async def test_the_asynchronous_loop_gives_the_next_batch_to_trainers_that_are_at_work_and_no_more() -> None:
    class Asked(ToyCluster):
        """A step lasts until the next one was asked for."""

        asked = 0

        async def step(self, batch: Batch) -> StepReport:
            self.asked += 1
            return await super().step(batch)

        async def train(self, batch: Batch) -> StepReport:
            async with asyncio.timeout(30.0):
                while self.asked < min(batch.step + 2, 6):
                    await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert self.asked == min(batch.step + 2, 6)
            return await super().train(batch)

    cluster = Asked()
    await train(cluster, range(6), bound=3)
    assert cluster.served == 6
    assert all(batch.step - group.version <= 3 for batch in cluster.batches for group in batch.groups)


async def test_a_synchronous_run_that_is_resumed_ends_with_the_same_bits() -> None:
    whole, first = ToyCluster(), ToyCluster()
    await train(whole, range(8))
    await train(first, range(3))
    second = ToyCluster(served=3, versions=[*first.versions[:3], first.versions[3]])
    await train(second, range(3, 8), state=first.batches[-1].after.serve(3))
    numbers = [group.number for batch in (*first.batches, *second.batches) for group in batch.groups]
    assert numbers == list(range(32)), "no prompt is skipped, and none comes twice"
    assert torch.equal(whole.versions[-1], second.versions[-1])


@pytest.mark.parametrize("bound", [0, 2])
async def test_a_reward_that_fails_costs_its_episodes_and_not_the_run(bound: int) -> None:
    def picky(answer: JudgedAnswer) -> float:
        if answer.prompt.number == 2 or (answer.prompt.number == 3 and answer.text == "+"):
            raise ZeroDivisionError("no")
        return float(answer.text == answer.prompt.answer)

    cluster = ToyCluster()
    buffer = await train(cluster, range(4), bound, reward=Rubric([Criterion("picky", 1.0, picky)]))
    trained = [group.number for batch in cluster.batches for group in batch.groups]
    assert 2 not in trained
    assert len(trained) == len(set(trained)) == 16
    assert buffer.state().failed == 1


async def test_groups_with_equal_rewards_are_drawn_again_with_other_seeds() -> None:
    cluster = ToyCluster()
    await train(cluster, range(1), reward=Rubric([Criterion("flat", 1.0, lambda answer: 0.5)]), redraws=2)
    assert len(cluster.requests) == len({request.seeds for request in cluster.requests}) == 4 * 3


class KeptVersions:
    """Records what an evaluation asks of the store and the disk."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.best: list[int] = []

    async def hold(self, version: int, /) -> Any:
        self.held.add(version)
        return SimpleNamespace(release=lambda: self.held.remove(version))

    async def keep_best(self, version: int, reward: float, /) -> None:
        assert version in self.held
        self.best.append(version)


@pytest.mark.parametrize("bound", [0, 1, 3])
async def test_the_policy_learns_and_the_best_version_that_is_evaluated_beside_training_is_kept(bound: int) -> None:
    scores: list[Evaluated] = []
    cluster, judge = ToyCluster(), Judge(EXACT, TOKENIZER)
    kept: Any = KeptVersions()
    prompts = [PromptSource(PROBLEMS, TOKENIZER, 0).prompt(number) for number in range(4)]
    play = functools.partial(play_prompts, cluster.generate, judge, prompts, SAMPLING)
    evaluation = HeldOutEvaluation(play, 5, kept, scores.append)
    await train(cluster, range(40), bound, evaluation=evaluation)
    trained = cluster.rewards()
    assert mean(trained[:4]) < 0.4 and mean(trained[-4:]) > 0.9
    assert [each.version for each in scores] == list(range(0, 41, 5))
    assert scores[-1].reward == 1.0 > (scores[0].reward or 0.0)
    rewards = [each.reward for each in scores if each.reward is not None]
    assert [each.judged for each in scores] == [4] * len(rewards)
    assert kept.best[-1] == scores[rewards.index(max(rewards))].version
    assert not kept.held
    assert [each.version for each in scores if each.best] == kept.best


async def evaluated(*results: HeldOutResult) -> tuple[list[Evaluated], list[int]]:
    """The scores of versions 0, 5, 10 ... with these results, and the versions that were kept as the best, in order."""
    scores: list[Evaluated] = []
    kept, asked = KeptVersions(), []

    async def play(version: int) -> HeldOutResult:
        asked.append(version)
        return results[version // 5]

    evaluation = HeldOutEvaluation(play, 5, kept, scores.append)
    for number in range(len(results)):
        await evaluation.begin(5 * number)
    await evaluation.settle()
    assert asked == [5 * number for number in range(len(results))], "each evaluation asks for its version alone"
    return scores, kept.best


def result_of(*rewards: float, failed: int = 0, versions: tuple[int, ...] = ()) -> HeldOutResult:
    answers = [HeldOutAnswer(reward=each) for each in rewards]
    return HeldOutResult((*answers, *[HeldOutAnswer(failure="it died")] * failed), versions)


async def test_an_evaluation_is_compared_by_reward_among_those_that_judged_about_as_many_episodes() -> None:
    """Neither by counting 0 where rewards are negative, nor by the few that were judged."""
    negative = result_of(-0.2, -0.2, -0.2, -0.2)
    scores, best = await evaluated(negative, result_of(-0.5, failed=3), result_of(1.0, failed=3))
    assert [(each.reward, each.judged, each.failed) for each in scores] == [(-0.2, 4, 0), (-0.5, 1, 3), (1.0, 1, 3)]
    assert best == [0]
    scores, best = await evaluated(result_of(failed=4), result_of(1.0, failed=3), result_of(0.3, 0.3, 0.3, 0.3))
    assert scores[0].reward is None and best == [5, 10]
    most, all_of_them = result_of(*[0.5] * 19, failed=1), result_of(*[0.5] * 19, 0.6)
    assert (await evaluated(most, all_of_them))[1] == [0, 5], "one of twenty is comparable"
    assert (await evaluated(all_of_them, most))[1] == [0]


async def test_tokens_of_another_version_are_no_evaluation_of_this_one() -> None:
    with pytest.raises(OtherVersion, match="version 0 have tokens of 26, 27"):
        await evaluated(result_of(1.0, versions=(0, 27, 26, 27)))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_loop_that_failed_stops_the_evaluation_beside_it(fails: bool) -> None:
    complaints: list[str] = []
    ended: list[int] = []

    async def play(version: int) -> HeldOutResult:
        if fails:
            raise OSError("no space left")
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append(version)
        raise AssertionError

    gc.freeze()  # what is older costs time, and is no task of this test
    asyncio.get_running_loop().set_exception_handler(lambda loop, said: complaints.append(said["message"]))
    evaluation = HeldOutEvaluation(play, 5, KeptVersions())
    await evaluation.begin(5)
    await asyncio.sleep(0)
    await evaluation.stop()
    await evaluation.stop()
    del evaluation
    gc.collect()
    gc.unfreeze()
    await asyncio.sleep(0)
    assert bool(ended) is not fails
    assert not complaints


class Broken(Exception):
    pass


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("call", ["step", "generate", "switch"])
async def test_an_error_of_a_service_ends_the_loop_as_itself(call: str, bound: int) -> None:
    async def broken(*_: object) -> Any:
        raise Broken

    cluster = ToyCluster()
    setattr(cluster, call, broken)
    with pytest.raises(Broken):
        await train(cluster, range(4), bound)


async def test_a_block_that_is_cancelled_stays_cancelled_whatever_the_works_beside_it_raise_then() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            raise Broken

    async def block() -> None:
        async with running(work):
            await asyncio.sleep(60.0)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_algorithm_fits_on_a_few_pages_and_knows_nothing_of_processes() -> None:
    text = "\n".join((ROOT / "rl" / "grpo" / f"{name}.py").read_text() for name in ("loop", "loss"))
    assert len(text.splitlines()) < 350
    words = ("process", "fail_", "crash", "retry", "kill", "host", "socket", "restart", "checkpoint", "replica")
    assert not [word for word in words if word in text.lower()]


def test_requests_depend_on_seed_prompt_and_draw_alone() -> None:
    prompt = Prompt(number=3, tokens=(1, 2))
    request = SAMPLING.request(5, prompt, 0, 7)
    assert request == SAMPLING.request(5, prompt, 0, 7)
    others = [SAMPLING.request(6, prompt, 0, 7), SAMPLING.request(5, prompt, 1, 7)]
    others.append(SAMPLING.request(5, Prompt(number=4, tokens=(1, 2)), 0, 7))
    assert not {seed for each in others for seed in each.seeds} & set(request.seeds)


TURNS = Sampling(group=4, max_new_tokens=1)


class HintSession:
    """Sample k has k + 1 turns, with a hint between two of them. The reward is the last token, unless it is `dull`."""

    environment = "hints"

    def __init__(self, number: int, place: int, dull: bool) -> None:
        self._number, self._left, self._dull = number, place, dull

    async def reset(self, seed: int) -> Observation:
        return Observation(text=str(self._number))

    async def step(self, action: str) -> Observation:
        self._left -= 1
        if self._number == 1:
            raise EnvironmentDied("hints", "step", "it died")
        over = self._left < 0
        return Observation(text="hint", reward=float(action) if over and not self._dull else 0.0, done=over)


HINT_CODEC: Any = SimpleNamespace(
    encode=lambda text, turn: (100,) if turn else (int(text) + 1,), decode=lambda tokens: str(tokens[0])
)


class Hints:
    """Begins groups of such sessions; the first `dull` of each number have equal rewards."""

    def __init__(self, dull: int = 0) -> None:
        self.open, self.begun, self._dull = 0, list[int](), dull

    @asynccontextmanager
    async def begin(self, number: int, count: int = 4, /) -> AsyncIterator[GameInPlay]:
        self.begun.append(number)
        self.open += 1
        sessions: list[Any] = [HintSession(number, k, self.begun.count(number) <= self._dull) for k in range(count)]
        plays = [EpisodePlay(each, HINT_CODEC, number=number, seed=0, max_turns=9) for each in sessions]
        await asyncio.gather(*(each.begin() for each in plays))
        yield GameInPlay(number, plays, lambda _: None, lambda _: None)
        self.open -= 1

    held_out = begin


class SeedPolicy:
    """Draws tokens that are a function of the request; also the trainer of its batches."""

    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []
        self.batches: list[Batch] = []

    async def generate(self, request: SamplingRequest) -> Sequence[Completion]:
        self.requests.append(request)
        await asyncio.sleep(0)
        version = request.version or 0
        return [completion((seed % 7,), version, "length") for seed in request.seeds]

    async def step(self, batch: Batch, /) -> StepReport:
        self.batches.append(batch)
        return StepReport(step=batch.step, version=batch.step + 1)


async def played(hints: Hints, redraws: int = 0) -> tuple[SeedPolicy, ReplayBuffer]:
    """Two steps of two groups."""
    policy, buffer = SeedPolicy(), ReplayBuffer(StalenessRule(groups=2), patience=30.0)

    async def episode() -> None:
        number = (await buffer.admit()).number
        await play_episodes(number, policy.generate, hints, buffer, TURNS, 9, redraws)

    async def serve(version: int) -> None:
        buffer.serve(version)

    await synchronous(episode, buffer, policy.step, serve, range(2))
    return policy, buffer


async def test_each_turn_of_a_group_is_one_request_after_all_tokens_before_it_and_a_failed_group_is_replaced() -> None:
    """Tokens are drawn with the version of the step. Those of the environment have 0, which does not count."""
    hints = Hints()
    policy, buffer = await played(hints)
    assert len(policy.requests) == 4 * TURNS.group + 1, "of four groups that are trained, and one that failed"
    known = {prompt for request in policy.requests for prompt in request.prompts}
    for batch in policy.batches:
        for group in batch.groups:
            for episode in group.episodes:
                assert (*episode.prompt.tokens, *episode.tokens[:-1]) in known
    seeds = [seed for request in policy.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds), "each sample has a seed of its own in each turn"
    assert [[group.number for group in batch.groups] for batch in policy.batches] == [[0, 2], [3, 4]]
    assert [[group.version for group in batch.groups] for batch in policy.batches] == [[0, 0], [1, 1]]
    assert buffer.state().failed == 1
    assert hints.open == 0 and len(hints.begun) == 5
    again, _ = await played(Hints())
    assert again.batches == policy.batches, "what is drawn depends on the seed, the numbers and what was seen alone"
    assert sorted(again.requests, key=repr) == sorted(policy.requests, key=repr)


@pytest.mark.parametrize("redraws, times", [(0, 1), (1, 2), (5, 3)])
async def test_a_group_that_teaches_nothing_is_played_again(redraws: int, times: int) -> None:
    hints = Hints(dull=2)
    await played(hints, redraws)
    assert hints.begun.count(0) == times


async def test_held_out_episodes_are_played_greedily_as_many_at_a_time_as_a_group_has() -> None:
    policy = SeedPolicy()
    result = await play_games(policy.generate, Hints(), 10, TURNS, 3, str)
    assert len(result.answers) == len(result.judged) == 10
    assert set(result.versions) == {3} and {request.temperature for request in policy.requests} == {0.0}
    assert max(len(request.prompts) for request in policy.requests) == TURNS.group
