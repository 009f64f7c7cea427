"""The trainers of a run: a service whose replicas are members of one session, and spares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.console.units import counted
from holdfast.rl.actors.engine import Engine
from holdfast.rl.actors.errors import ActorDied, EndpointFailed
from holdfast.rl.actors.replicas import ReplicaEvent, ServiceReplica
from holdfast.rl.actors.service import Service, served
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.errors import RunFailed
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.run.hosts import service_options, session_options
from holdfast.rl.run.run_status import TrainerRow
from holdfast.rl.run.telemetry import ProcessRecorder, RunTelemetry, answers
from holdfast.rl.telemetry import WorkReport
from holdfast.rl.trainers.errors import TrainerEnded
from holdfast.rl.trainers.trainer_actor import TrainerActor, TrainerPosition, TrainerStatus
from holdfast.rl.trainers.trainer_group import TrainerGroup

ROLE = "trainer"


class SessionMember:
    """A trainer in the group. One that was evicted, or could not join, is lost: it is killed, and replaced."""

    def __init__(self, replica: ServiceReplica) -> None:
        self._replica = replica

    async def call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        """See `ServiceReplica.call`. Raises `RunFailed` for an error that ended the trainer's steps, in one line."""
        replica = self._replica
        try:
            return await replica.call(method, *args, timeout=timeout)
        except EndpointFailed as error:
            ended = error.__cause__
            if isinstance(ended, TrainerEnded) and ended.retryable:
                replica.lose(describe(ended))
                raise ActorDied(replica.name, replica.pid, describe(ended), method) from error
            if isinstance(ended, TrainerEnded) and not ended.fault:
                raise RunFailed(f"{replica.name} has ended: {ended.why}") from error
            raise


class TrainerProcesses:
    """The trainers of a run. `group` trains; `failed` is called with an error that ends the run."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        source: ModelSource,
        checkpoints: Path,
        store: str,
        environ: Mapping[str, str],
        telemetry: RunTelemetry,
        failed: Callable[[HoldfastError], None],
    ) -> None:
        self.group = TrainerGroup((ActorDied,), saved_after=config.saved_after)
        self._config, self._failed = config, failed
        self._arguments = (config, source, store, session_options(config), str(checkpoints))
        titan = config.trainer.kind == "titan"
        self._spec = served(
            TrainerActor,
            name=ROLE,
            num_replicas=config.trainer.replicas + config.trainer.spares,
            python=str(extra_python("titan", config.trainer.python)) if titan else None,
            prepare=self._begin,
            observer=self._hear,
            **service_options(config, engine, environ),
        )
        self._recorder = ProcessRecorder(ROLE, telemetry)
        self._members: dict[str, SessionMember] = {}
        self._service: Service | None = None
        self._lost = 0

    async def start(self) -> TrainerPosition:
        """Start all trainers and spares; returns where training begins. Raises `ServiceFailed`, `TrainersLost`."""
        self._service = await self._spec.as_service(*self._arguments)
        return await self.group.position()

    async def work(self) -> Mapping[str, WorkReport]:
        """What each trainer did since the last call, without those that do not answer."""
        return {} if self._service is None else await answers(self._service.work)

    async def rows(self) -> tuple[TrainerRow, ...]:
        """The state of each trainer that answers."""
        if self._service is None:
            return ()
        found: Mapping[str, TrainerStatus] = await answers(self._service.endpoint("status"))
        pids = {each.name: each.pid for each in self._service.status().replicas}
        return tuple(
            TrainerRow(
                name=name,
                pid=pids.get(name, 0),
                rank=each.rank,
                epoch=each.epoch,
                committed=each.committed,
                newest_batch=each.newest_batch,
            )
            for name, each in found.items()
        )

    async def close(self) -> None:
        """End all trainers."""
        if self._service is not None:
            await self._service.close()

    async def _begin(self, replica: ServiceReplica) -> None:
        """Have a new trainer join the session, and get the current batch."""
        await replica.call("begin")
        member = self._members[replica.name] = SessionMember(replica)
        self.group.add(member)

    def _hear(self, event: ReplicaEvent) -> None:
        self._recorder.hear(event)
        if event.kind not in ("lost", "start_failed"):
            return
        if (member := self._members.pop(event.replica, None)) is not None:
            self.group.remove(member)
        self._lost += not event.passing
        if self._lost > self._config.engine.restarts:
            lost = counted(self._lost, "trainer")
            self._failed(RunFailed(f"{lost} were lost, the last of them {event.replica}: {event.detail}"))
        elif self._service is not None:
            try:
                self._service.check()
            except HoldfastError as error:
                self._failed(error)
