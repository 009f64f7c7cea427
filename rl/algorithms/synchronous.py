"""The synchronous loop: generate a batch, train it, update the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from holdfast.rl.algorithms.background import together
from holdfast.rl.algorithms.protocols import Buffer, Evaluation, Policy, Trainer


async def synchronous(
    episode: Callable[[], Awaitable[None]],
    policy: Policy,
    buffer: Buffer,
    trainer: Trainer,
    evaluation: Evaluation,
    steps: Iterable[int],
) -> None:
    """Train the batches that begin at `steps`; with a buffer of bound 0, each on episodes of the newest weights."""
    for step in steps:
        while wanted := buffer.admissible:
            await together(episode, wanted)
        batch = await buffer.take(step)
        report = await trainer.step(batch)
        buffer.commit()
        await evaluation.settle()
        await policy.update.fanout(report.version)
        buffer.serve(report.version)
        await evaluation.begin(report.version)
    await evaluation.settle()
