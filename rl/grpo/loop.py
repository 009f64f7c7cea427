"""The two loops, as the field writes them, and what they repeat: one episode of one turn or of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager

from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Group
from holdfast.rl.data.replay_buffer import FailedGroup
from holdfast.rl.grpo.protocols import Buffer, Data, Evaluation, Evaluator, Games, GroupNumbers, Policy, Trainer

Spawn = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]
"""Runs a coroutine in a task that ends with the block it was begun in."""


async def synchronous(
    episode: Callable[[], Awaitable[None]],
    policy: Policy,
    buffer: Buffer,
    trainer: Trainer,
    evaluation: Evaluation,
    steps: Iterable[int],
) -> None:
    """Generate a batch, train it, update the policy, for the batches that begin at `steps`.

    With a buffer of bound 0, each is trained on episodes of the newest weights.
    """
    for step in steps:
        while wanted := buffer.admissible:
            await together(episode, wanted)
        batch = await buffer.take(step)
        report = await trainer.step(batch)
        buffer.commit()
        await _serve(report.version, policy, buffer, evaluation)
    await evaluation.settle()


async def asynchronous(
    episode: Callable[[], Awaitable[None]],
    policy: Policy,
    buffer: Buffer,
    trainer: Trainer,
    evaluation: Evaluation,
    steps: Iterable[int],
    concurrency: int,
) -> None:
    """Train the batches that begin at `steps`, while up to `concurrency` episodes are generated.

    The policy gets new weights beside the next step: what is generated meanwhile has the version that its tokens name,
    and the buffer holds its bound on their age.
    """

    async def episodes() -> None:
        while True:
            await episode()

    async with running(episodes, concurrency) as spawn:
        serving: asyncio.Task[None] | None = None
        for step in steps:
            batch = await buffer.take(step)
            report = await trainer.step(batch)
            buffer.commit()
            if serving is not None:
                await serving
            serving = spawn(_serve(report.version, policy, buffer, evaluation))
        if serving is not None:
            await serving
    await evaluation.settle()


async def _serve(version: int, policy: Policy, buffer: Buffer, evaluation: Evaluation) -> None:
    """Switch the whole policy to `version`, once no evaluation needs the one before."""
    await evaluation.settle()
    await policy.update.fanout(version)
    buffer.serve(version)
    await evaluation.begin(version)


async def generate_episode(
    data: Data, policy: Policy, reward: Evaluator, buffer: Buffer, sampling: Sampling, seed: int, redraws: int = 0
) -> None:
    """Sample a prompt, generate, evaluate, and add the group to the buffer.

    While all its rewards are equal it teaches nothing, and is drawn again, at most `redraws` times (DAPO).
    """
    prompt = await data.sample()
    for draw in range(redraws + 1):
        request = sampling.request(seed, prompt, draw, buffer.required_version)
        completions = await policy.generate.route(request)
        group = await reward.evaluate(prompt, completions)
        if teaches(group):
            break
    await buffer.add(group)


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


def teaches(group: Group | FailedGroup) -> bool:
    """Whether another draw could not be better: the rewards differ, or there are none."""
    return isinstance(group, FailedGroup) or len({each.reward for each in group.episodes}) > 1


@asynccontextmanager
async def running(work: Callable[[], Awaitable[None]], tasks: int) -> AsyncIterator[Spawn]:
    """Run `tasks` copies of `work`, and what the block spawns, until it ends; the first error of any ends all."""
    first: list[BaseException] = []

    async def noted(awaitable: Awaitable[None]) -> None:
        try:
            await awaitable
        except BaseException as error:
            if not first:
                first.append(error)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            begun = [group.create_task(noted(work())) for _ in range(tasks)]

            def spawn(coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
                begun.append(group.create_task(noted(coroutine)))
                return begun[-1]

            try:
                yield spawn
            except BaseException as error:
                if not first:
                    first.append(error)
                raise
            for each in begun:
                each.cancel()
        return
    except BaseExceptionGroup:
        failure = first.pop()
    raise failure


async def together(work: Callable[[], Awaitable[None]], tasks: int) -> None:
    """Run `tasks` copies of `work` to their ends; the first error of any ends all, and is raised."""
    left = tasks
    done = asyncio.Event()

    async def counted() -> None:
        nonlocal left
        await work()
        left -= 1
        if left == 0:
            done.set()

    async with running(counted, tasks):
        await done.wait()
