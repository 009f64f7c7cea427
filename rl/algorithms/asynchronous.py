"""The asynchronous loop: generate and train at the same time, as far apart as the buffer allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from holdfast.rl.algorithms.background import running
from holdfast.rl.algorithms.protocols import Buffer, Evaluation, Policy, Trainer


async def asynchronous(
    episode: Callable[[], Awaitable[None]],
    policy: Policy,
    buffer: Buffer,
    trainer: Trainer,
    evaluation: Evaluation,
    steps: Iterable[int],
    concurrency: int,
) -> None:
    """Train the batches that begin at `steps`, while up to `concurrency` episodes are generated."""

    async def episodes() -> None:
        while True:
            await episode()

    async with running(episodes, concurrency):
        for step in steps:
            batch = await buffer.take(step)
            report = await trainer.step(batch)
            buffer.commit()
            await evaluation.settle()
            await policy.update.fanout(report.version)
            buffer.serve(report.version)
            await evaluation.begin(report.version)
    await evaluation.settle()
