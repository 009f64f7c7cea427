"""The trainers' processes: starts them, with spares, and another one for each that dies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.comms.errors import HoldfastError, describe
from holdfast.ft.console.units import counted
from holdfast.rl.actors.engine import ActorProcess, Engine
from holdfast.rl.actors.errors import AWAY_SECONDS, ActorDied, ActorStartFailed, EndpointFailed
from holdfast.rl.config.named_code import extra_python
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.run.errors import RunFailed
from holdfast.rl.run.hosts import HostTurns, session_options
from holdfast.rl.run.run_events import ProcessLost, ProcessReady, ProcessStarted
from holdfast.rl.run.run_status import TrainerRow
from holdfast.rl.run.telemetry import RunTelemetry
from holdfast.rl.telemetry import WorkReport
from holdfast.rl.trainers.errors import TrainerEnded
from holdfast.rl.trainers.trainer_actor import TrainerActor, TrainerPosition, TrainerStatus
from holdfast.rl.trainers.trainer_group import TrainerGroup

ROLE = "trainer"
ASK_SECONDS = 5.0
"""Seconds that a trainer has to say what it does."""

PAUSE_SECONDS = 0.5
"""Seconds until a trainer is started again that could not be made for a reason that passes."""


class MemberProcess:
    """The process of a trainer. One that was evicted, or could not join, is killed, and counts as dead from then on."""

    def __init__(self, process: ActorProcess) -> None:
        self._process = process
        self.host, self.pid, self.stop = process.host, process.pid, process.stop

    async def call(self, method: str, /, *args: Any, timeout: float | None = None) -> Any:
        """See `ActorProcess.call`. Raises `RunFailed` for an error that ended the trainer's steps, in one line."""
        try:
            return await self._process.call(method, *args, timeout=timeout)
        except EndpointFailed as error:
            ended = error.__cause__
            if isinstance(ended, TrainerEnded) and ended.retryable:
                self._process.kill()
                raise ActorDied(self._process.name, self.pid, describe(ended), method) from error
            if isinstance(ended, TrainerEnded) and not ended.fault:
                raise RunFailed(f"{self._process.name} has ended: {ended.why}") from error
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
        self._config, self._engine, self._source, self._store = config, engine, source, store
        self._checkpoints = str(checkpoints)
        self._environ, self._telemetry, self._failed = dict(environ), telemetry, failed
        self._numbers, self._hosts = itertools.count(), HostTurns(config.engine.hosts)
        self._alive: dict[str, MemberProcess] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._lost, self._closing = 0, False
        titan = config.trainer.kind == "titan"
        self._python = str(extra_python("titan", config.trainer.python)) if titan else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the living trainers, spares included."""
        return tuple(self._alive)

    async def start(self) -> TrainerPosition:
        """Start all trainers and spares; returns where training begins. Raises `ActorStartFailed`, `TrainersLost`."""
        wanted = self._config.trainer.replicas + self._config.trainer.spares
        await asyncio.gather(*(self._start() for _ in range(wanted)))
        return await self.group.position()

    async def work(self) -> Mapping[str, WorkReport]:
        """What each trainer did since the last call, without those that do not answer."""
        return await self._ask_all("work")

    async def rows(self) -> tuple[TrainerRow, ...]:
        """The state of each trainer that answers."""
        pids = {name: process.pid for name, process in self._alive.items()}
        found: Mapping[str, TrainerStatus] = await self._ask_all("status")
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

    async def _ask_all(self, method: str) -> dict[str, Any]:
        asked = dict(self._alive)
        calls = (each.call(method, timeout=ASK_SECONDS) for each in asked.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            name: answer for name, answer in zip(asked, answers, strict=True) if not isinstance(answer, BaseException)
        }

    async def digest(self) -> str:
        """Wait until all steps are committed and published; returns the digest of the last weights."""
        calls = [asyncio.ensure_future(each.call("finished")) for each in self._alive.values()]
        try:
            for call in asyncio.as_completed(calls):
                try:
                    digest: str = await call
                except ActorDied:
                    continue
                if digest:
                    return digest
            raise RunFailed("every trainer ended before the last weights were published")
        finally:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def close(self) -> None:
        """End all trainers."""
        self._closing = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in tuple(self._alive.values())), return_exceptions=True)

    async def _start(self, replaces: str = "") -> None:
        name, now = f"{ROLE}-{next(self._numbers)}", self._telemetry.now
        began = now()
        started = await self._hosts.start(
            lambda host: self._engine.start(
                name,
                TrainerActor,
                self._config,
                self._source,
                self._store,
                session_options(self._config),
                self._checkpoints,
                environ=self._environ,
                python=self._python,
                host=host,
                on_exit=lambda how: self._exited(name, how),
            )
        )
        process = self._alive[name] = MemberProcess(started)
        self._telemetry.emit(
            ProcessStarted(time=began, name=name, role=ROLE, host=process.host, pid=process.pid, replaces=replaces)
        )
        try:
            await process.call("begin")
        except ActorDied:  # `_exited` replaces it
            return
        self.group.add(process)
        self._telemetry.emit(ProcessReady(time=now(), name=name, role=ROLE, seconds=now() - began))

    def _exited(self, name: str, how: str) -> None:
        process = self._alive.pop(name, None)
        if process is None or self._closing:
            return
        self.group.remove(process)
        self._telemetry.emit(
            ProcessLost(
                time=self._telemetry.now(),
                name=name,
                role=ROLE,
                host=process.host,
                pid=process.pid,
                how=how.splitlines()[0],
            )
        )
        if not self._one_more_lost(f"{name}: {how}"):
            task = asyncio.get_running_loop().create_task(self._replace(name))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _replace(self, name: str) -> None:
        began = time.monotonic()
        while True:
            try:
                await self._start(replaces=name)
                return
            except ActorStartFailed as error:
                if error.retryable and time.monotonic() - began < AWAY_SECONDS:
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                if self._one_more_lost(f"that in place of {name}: {describe(error)}"):
                    return
            except HoldfastError as error:
                self._failed(RunFailed(f"no trainer can be started in place of {name}: {describe(error)}"))
                return

    def _one_more_lost(self, what: str) -> bool:
        """Count a lost trainer. If these are too many the run has failed, and the result is true."""
        self._lost += 1
        too_many = self._lost > self._config.engine.restarts
        if too_many:
            self._failed(RunFailed(f"{counted(self._lost, 'trainer')} were lost, the last of them {what}"))
        return too_many
