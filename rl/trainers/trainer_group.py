"""`TrainerGroup`: the trainers of a run, as the algorithm sees them: one that does not die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from holdfast.comms.errors import describe
from holdfast.rl.data.replay_buffer import Batch, StepReport
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.trainers.errors import TrainersLost
from holdfast.rl.trainers.trainer_actor import TrainerPosition


class TrainerProcess(Protocol):
    """A process with a `TrainerActor`, as engines start them."""

    async def call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the actor."""


class TrainerGroup:
    """Sends each batch to all trainers, spares included, and returns the first report.

    Trainers may be added and removed at any time: one that is added during a step gets the batch too. `died` are the
    errors of calls to a process that is gone; other errors of a trainer are errors of the step. If all trainers are
    gone, others must be added within `patience` seconds. `saved_after` tells for the step that a batch begins with
    whether a checkpoint is written once it is trained: the state of the replay buffer goes with such batches.
    """

    def __init__(
        self,
        died: tuple[type[Exception], ...],
        *,
        timeout: float = 600.0,
        patience: float = 60.0,
        saved_after: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._died, self._timeout, self._patience, self._saved_after = died, timeout, patience, saved_after
        self._trainers: list[TrainerProcess] = []
        self._changed = asyncio.Event()

    def add(self, trainer: TrainerProcess) -> None:
        """Add a trainer; it gets the current batch."""
        self._trainers.append(trainer)
        self._changed.set()

    def remove(self, trainer: TrainerProcess) -> None:
        """Forget a trainer; no effect if it is not there."""
        if trainer in self._trainers:
            self._trainers.remove(trainer)

    async def position(self) -> TrainerPosition:
        """Wait until a trainer takes part; returns the step to begin with. Raises as `step`."""
        found: TrainerPosition = await self._first("position", 0)
        return found

    async def step(self, batch: Batch) -> StepReport:
        """Train on a batch; returns once it is committed.

        Raises `TrainersLost` if no trainer is left, TimeoutError after `timeout` seconds, and a trainer's own error.
        """
        report: StepReport = await self._first(
            "train", batch.step, EncodedBatch.of(batch, saved=self._saved_after(batch.step))
        )
        return report

    async def finished(self, steps: int) -> str:
        """Wait until all `steps` are committed and published; returns the digest of the weights. Raises as `step`."""
        digest: str = await self._first("finished", steps)
        return digest

    async def _first(self, method: str, step: int, *args: Any) -> Any:
        """Call a method of all trainers; returns the first answer that says something: a spare's is None, or ""."""
        calls: dict[asyncio.Task[Any], TrainerProcess] = {}
        asked: list[TrainerProcess] = []
        errors: list[str] = []
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    self._changed.clear()
                    for trainer in self._trainers:
                        if trainer not in asked:
                            asked.append(trainer)
                            calls[asyncio.ensure_future(trainer.call(method, *args))] = trainer
                    changed = asyncio.ensure_future(self._changed.wait())
                    try:
                        done, _ = await asyncio.wait(
                            [changed, *calls],
                            timeout=None if calls else self._patience,
                            return_when=asyncio.FIRST_COMPLETED,
                        )
                    finally:
                        changed.cancel()
                    if not done:
                        raise TrainersLost(step, tuple(errors))
                    answers = []
                    for call in [each for each in calls if each in done]:
                        trainer = calls.pop(call)
                        try:
                            answers.append(call.result())
                        except self._died as error:
                            errors.append(describe(error))
                            self.remove(trainer)
                    for answer in answers:
                        if answer:
                            return answer
        finally:
            for call in calls:
                call.add_done_callback(_forget)
                call.cancel()


def _forget(call: asyncio.Task[Any]) -> None:
    """Take the result of a call that is not needed any more, so that asyncio does not complain of it."""
    if not call.cancelled():
        call.exception()
