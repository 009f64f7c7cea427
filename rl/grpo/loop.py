"""The two loops, as the field writes them, and what they repeat: one episode of one turn or of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from holdfast.rl.config.run_config import Sampling
from holdfast.rl.data.episode import Completion, Group, Prompt, SamplingRequest
from holdfast.rl.data.replay_buffer import Batch, FailedGroup, ReplayBuffer, StepReport
from holdfast.rl.environments.play import EnvironmentGames

Work = Callable[[], Awaitable[None]]
Spawn = Callable[[Callable[[], Awaitable[Any]]], "asyncio.Task[Any]"]
"""Does work in a task that ends with the block it was begun in."""
Train = Callable[[Batch], Awaitable[StepReport]]
"""Trains a batch after those that were given before; returns once the new weights are committed."""
Serve = Callable[[int], Awaitable[None]]
"""Switches the whole policy to a version of the weights, and tells the buffer of it."""
Generate = Callable[[SamplingRequest], Awaitable[Sequence[Completion]]]
"""Draws the completions of a request from the policy."""
Evaluate = Callable[[Prompt, Sequence[Completion]], Awaitable[Group | FailedGroup]]
"""Makes a group of a prompt's completions, with rewards."""


async def synchronous(episode: Work, buffer: ReplayBuffer, train: Train, serve: Serve, steps: Iterable[int]) -> None:
    """Generate a batch, train it, update the policy, for the batches that begin at `steps`.

    With a buffer of bound 0, each is trained on episodes of the newest weights.
    """
    for step in steps:
        while wanted := buffer.admissible:
            await together(*[episode] * wanted)
        batch = await buffer.take(step)
        report = await train(batch)
        buffer.commit()
        await serve(report.version)


async def asynchronous(
    episode: Work,
    buffer: ReplayBuffer,
    train: Train,
    serve: Serve,
    steps: Iterable[int],
    concurrency: int,
) -> None:
    """Train the batches that begin at `steps`, while up to `concurrency` episodes are generated.

    The trainers have the next batch before they are done with one, and the policy gets new weights beside the next
    step: what is generated meanwhile has the version that its tokens name, and the buffer holds its bound on their age.
    """
    room = asyncio.Semaphore(2)

    async def episodes() -> None:
        while True:
            await episode()

    async def train_and_serve(batch: Batch, before: asyncio.Task[None] | None) -> None:
        report = await train(batch)
        room.release()
        if before is not None:
            await before
        await serve(report.version)

    async with running(*[episodes] * concurrency) as spawn:
        last: asyncio.Task[None] | None = None
        for step in steps:
            batch = await buffer.take(step)
            await room.acquire()
            buffer.commit()
            last = spawn(partial(train_and_serve, batch, last))
        if last is not None:
            await last


async def generate_episode(
    prompt: Prompt,
    generate: Generate,
    evaluate: Evaluate,
    buffer: ReplayBuffer,
    sampling: Sampling,
    seed: int,
    redraws: int = 0,
) -> None:
    """Generate after a prompt that has begun, evaluate, and add the group to the buffer.

    While all its rewards are equal it teaches nothing, and is drawn again, at most `redraws` times (DAPO).
    """
    for draw in range(redraws + 1):
        request = sampling.request(seed, prompt, draw, buffer.required_version)
        group = await evaluate(prompt, await generate(request))
        if teaches(group):
            break
    await buffer.add(group)


async def play_episodes(
    number: int,
    generate: Generate,
    games: EnvironmentGames,
    buffer: ReplayBuffer,
    sampling: Sampling,
    seed: int,
    redraws: int = 0,
) -> None:
    """Add the group of a number to the buffer, as `generate_episode` does, after as many turns as it takes."""
    version = buffer.required_version
    for draw in range(redraws + 1):
        async with games.begin(number) as game:
            while waiting := game.waiting:
                await game.act(await generate(sampling.turn(seed, number, draw, waiting, version)))
            group = game.result()
        if teaches(group):
            break
    await buffer.add(group)


def teaches(group: Group | FailedGroup) -> bool:
    """Whether another draw could not be better: the rewards differ, or there are none."""
    return isinstance(group, FailedGroup) or len({each.reward for each in group.episodes}) > 1


@asynccontextmanager
async def running(*works: Work) -> AsyncIterator[Spawn]:
    """Do `works`, and what the block spawns, beside the block until it ends; the first error of any ends all."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            begun: list[asyncio.Task[Any]] = []

            def spawn(work: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
                begun.append(group.create_task(_done(work)))
                return begun[-1]

            for work in works:
                spawn(work)
            try:
                yield spawn
            except BaseException as error:
                if not any(each.done() and not each.cancelled() and each.exception() for each in begun):
                    failure = error  # a group of errors has the block's last
                raise
            for each in begun:
                each.cancel()
        return
    except BaseExceptionGroup as errors:
        failure = failure or errors.exceptions[0]
    raise failure


async def _done(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


async def together(*works: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of all `works`, once they are done; the first error of any ends all, and is raised."""
    async with running() as spawn:
        tasks = [spawn(each) for each in works]
        await asyncio.wait(tasks)
        return [each.result() for each in tasks]
