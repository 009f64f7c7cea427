"""The trainers of a run: replicas of a service, all of them members or spares of one session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.console.units import counted
from holdfast.ft.membership.view import Timeouts
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.actors.service import ReplicaEvent, Service, ServiceReplica
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.data.replay_buffer import Batch, StepReport
from holdfast.rl.errors import RunFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.batch import EncodedBatch
from holdfast.rl.run.services import RunServices, answers
from holdfast.rl.telemetry import TrainerStatus
from holdfast.rl.trainers.trainer_actor import TrainerActor, TrainerEnded, TrainerPosition


def session_options(config: RunConfig) -> dict[str, Timeouts]:
    """The options of the trainers' session: between hosts, a trainer may be as silent as a host."""
    if not config.engine.hosts:
        return {}
    usual = Timeouts()
    suspect = max(config.engine.silence, usual.suspect)
    return {
        "timeouts": replace(
            usual, suspect=suspect, rebuild=usual.rebuild + suspect, operation=usual.operation + suspect
        )
    }


async def ask_trainer(trainer: ServiceReplica, method: str, *args: Any) -> Any:
    """Call a trainer. Raises `RunFailed` for an error that ended its steps, in one line, unless the others go on."""
    try:
        return await trainer.call(method, *args)
    except EndpointFailed as error:
        ended = error.__cause__
        if isinstance(ended, TrainerEnded) and ended.retryable:
            trainer.lose(describe(ended))
            raise ActorDied(trainer.name, trainer.pid, describe(ended), method) from error
        if isinstance(ended, TrainerEnded) and not ended.fault:
            raise RunFailed(f"{trainer.name} has ended: {ended.why}") from error
        raise


class TrainerGroup:
    """Sends each batch to all trainers, spares included, and returns the first report.

    Trainers may be added at any time: one that is added during a step gets the batch too. `ActorDied` removes a
    trainer; other errors of a trainer are errors of the step. If all trainers are gone, others must be added within
    `patience` seconds. `saved_after` tells for the step that a batch begins with whether a
    checkpoint is written once it is trained: the state of the replay buffer goes with such batches.
    """

    def __init__(
        self,
        *,
        timeout: float = 600.0,
        patience: float = 60.0,
        saved_after: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._timeout, self._patience, self._saved_after = timeout, patience, saved_after
        self._trainers: list[ServiceReplica] = []
        self._changed = asyncio.Event()

    def add(self, trainer: ServiceReplica) -> None:
        """Add a trainer; it gets the current batch."""
        self._trainers.append(trainer)
        self._changed.set()

    async def position(self) -> TrainerPosition:
        """Wait until a trainer takes part; returns the step to begin with. Raises as `step`."""
        found: TrainerPosition = await self._first("position", 0)
        return found

    async def step(self, batch: Batch) -> StepReport:
        """Train on a batch; returns once it is committed.

        Raises `RunFailed` if no trainer is left, or after `timeout` seconds, and a trainer's own error.
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
        calls: dict[asyncio.Task[Any], ServiceReplica] = {}
        asked: list[ServiceReplica] = []
        errors: list[str] = []
        try:
            async with asyncio.timeout(self._timeout) as limit:
                while True:
                    self._changed.clear()
                    for trainer in self._trainers:
                        if trainer not in asked:
                            asked.append(trainer)
                            calls[asyncio.ensure_future(ask_trainer(trainer, method, *args))] = trainer
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
                        known = "; ".join(errors) or "none was there"
                        raise RunFailed(f"no trainer is left for step {step}: {known}; resume from a checkpoint")
                    answers = []
                    for call in [each for each in calls if each in done]:
                        trainer = calls.pop(call)
                        try:
                            answers.append(call.result())
                        except ActorDied as error:
                            errors.append(describe(error))
                            if trainer in self._trainers:  # of two steps at once, the first has
                                self._trainers.remove(trainer)
                    for answer in answers:
                        if answer:
                            return answer
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = f"no trainer answered {method!r} for step {step} within {self._timeout:.4g} s"
            raise RunFailed(f"{why}; raise trainer.timeout if a step may take longer") from error
        finally:
            for call in calls:
                call.add_done_callback(_forget)
                call.cancel()


def _forget(call: asyncio.Task[Any]) -> None:
    """Take the result of a call that is not needed any more, so that asyncio does not complain of it."""
    if not call.cancelled():
        call.exception()


ROLE = "trainer"


class TrainerProcesses:
    """The trainers of a run. `group` trains."""

    def __init__(
        self,
        config: RunConfig,
        services: RunServices,
        source: ModelSource,
        checkpoints: Path,
        store: str,
    ) -> None:
        at_once = 2 if config.algorithm.mode == "asynchronous" else 1  # the second waits for the first
        self.group = TrainerGroup(timeout=at_once * config.trainer.timeout, saved_after=config.saved_after)
        self._config, self._services = config, services
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arguments = (config, source, store, session_options(config), str(checkpoints))
        self._service: Service | None = None
        self._lost = 0

    async def start(self) -> TrainerPosition:
        """Start all trainers and spares; returns where training begins. Raises `ServiceFailed`, `RunFailed`."""
        trainer = self._config.trainer
        self._service = await self._services.start(
            ROLE,
            TrainerActor,
            *self._arguments,
            num_replicas=trainer.replicas + trainer.spares,
            python=str(extra_python("titan", trainer.python)) if trainer.kind == "titan" else None,
            prepare=self._begin,
            observer=self._hear,
        )
        return await self.group.position()

    async def failure(self) -> None:
        """Raise the error that ends the run, once too many trainers were lost."""
        await self._failed

    async def statuses(self) -> Mapping[str, TrainerStatus]:
        """The state of each trainer that answers, by name."""
        return {} if self._service is None else await answers(self._service.endpoint("status"))

    async def _begin(self, replica: ServiceReplica) -> None:
        """Have a new trainer join the session, and get the current batch."""
        await replica.call("begin")
        self.group.add(replica)

    def _hear(self, event: ReplicaEvent) -> None:
        if event.kind not in ("lost", "start_failed") or self._failed.done():
            return
        self._lost += not event.passing
        if self._lost > self._config.engine.restarts:
            lost = counted(self._lost, "trainer")
            self._failed.set_exception(
                RunFailed(f"{lost} were lost, the last of them {event.replica.name}: {event.detail}")
            )
        elif self._service is not None:
            try:
                self._service.check()
            except HoldfastError as error:
                self._failed.set_exception(error)
