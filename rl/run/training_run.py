"""A run: its processes, and the loop of the algorithm over them. It outlives each of its parts, the driver included.

    with RunDirectory(path).open() as directory:
        result = await TrainingRun(config, directory, engine).run()

Trainers recover by themselves (`ft`), generators and holders are replicas of services. A new driver in the same
directory goes on from the newest checkpoint of the trainers, which has the replay buffer of its step too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from holdfast.comms.transport.liveness import this_host
from holdfast.ft import faultpoints
from holdfast.ft.launch.held_directory import HeldDirectory
from holdfast.ft.launch.job_contract import LocalContract
from holdfast.ft.schedulers import found_hosts
from holdfast.ft.telemetry.metrics import PORT
from holdfast.rl.actors.engine import Engine
from holdfast.rl.config.contradictions import check_plugins_run_here, staleness_rule
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import check_unchanged, load_config, placed, resolved
from holdfast.rl.data.replay_buffer import Batch, BufferState, ReplayBuffer, StepReport
from holdfast.rl.errors import RunFailed, StepsDone
from holdfast.rl.generators.models import ModelSource
from holdfast.rl.grpo.loop import asynchronous, running, synchronous, together
from holdfast.rl.run.episodes import RunEpisodes
from holdfast.rl.run.evaluation import BestVersion, HeldOutEvaluation
from holdfast.rl.run.generation import Generators, Holders
from holdfast.rl.run.policy import policy_source
from holdfast.rl.run.run_directory import RunDirectory, RunStatus
from holdfast.rl.run.run_events import Evaluated, ProcessStarted, RunResumed, StepTrained
from holdfast.rl.run.services import RunServices, between_hosts, new_register, service_metrics
from holdfast.rl.run.telemetry import Observer, RunTelemetry
from holdfast.rl.run.trainer_processes import TrainerProcesses
from holdfast.rl.trainers.trainer_actor import TrainerPosition
from holdfast.store import WeightStore

JOB = "rl"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to: the digest of its last weights, and the best evaluation."""

    digest: str
    steps: int
    seconds: float
    best: Evaluated | None


class TrainingRun:
    """One driver of the run in `directory`, which is open. Paths in the configuration are relative to `folder`.

    Raises `ConfigChanged` if the run was begun with another configuration, `StepsDone` if it has more steps.
    `run` raises `RunFailed`, and the errors of the configuration's parts before anything starts.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        engine: Engine,
        observers: Sequence[Observer] = (),
        folder: Path = Path(),
    ) -> None:
        config = placed(config, folder)
        self._written, self._directory, self._engine = config, directory, engine
        before = tuple(directory.events())
        self._before = before
        if directory.config_file.exists():
            check_unchanged(load_config(directory.config_file), config)
        hosts = found_hosts(config.engine.hosts)
        self._config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, hosts=hosts))
        if (done := max(directory.saved_steps(), default=0)) > config.steps:
            raise StepsDone(done, config.steps)
        self.telemetry = RunTelemetry(directory, tuple(observers), max((each.time for each in before), default=0.0))
        self._done = 0

    async def run(self) -> RunResult:
        """Do all steps that are left; returns once their last weights are published. Leaves no process behind."""
        faultpoints.arm_from_environment()
        clock = time.monotonic()
        began = ProcessStarted(
            time=self.telemetry.at(clock), name="driver", role="driver", pid=os.getpid(), clock=clock, wall=time.time()
        )
        config, directory = self._config, self._directory
        check_plugins_run_here(config)
        policy = policy_source(config)
        policy.check_device()
        episodes = RunEpisodes(config, self.telemetry)
        try:
            source = await episodes.prepare(policy, directory.policy)
            return await self._run(episodes, source, began)
        finally:
            await episodes.close()

    async def _run(self, episodes: RunEpisodes, source: ModelSource, began: ProcessStarted) -> RunResult:
        config, directory = self._config, self._directory
        self.telemetry.emit(began)  # a run that is refused has no event, so the next one is not called resumed
        directory.write_config(resolved(self._written))
        with HeldDirectory("job-", directory.path) as job:  # removes what drivers that were killed have left
            contract = LocalContract(
                JOB,
                job.path,
                config.trainer.backend,
                config.trainer.replicas,
                new_register(config.engine.register),
            ).made(directory.new_session_logs())
            url, environ = contract.register_url, {**contract.environ(), **between_hosts(config)}
            services = RunServices(config, self._engine, environ, self.telemetry)
            trainers = TrainerProcesses(config, services, source, directory.checkpoints, url)
            generators = Generators(config, services, source, url, self.telemetry)
            async with contextlib.AsyncExitStack() as undo:
                opened = partial(WeightStore, url, hold=False, plane=config.store.plane)
                store = undo.enter_context(await asyncio.to_thread(opened))
                best = BestVersion(store, directory.best, source)
                undo.push_async_callback(generators.close)
                undo.push_async_callback(services.close)
                undo.push_async_callback(episodes.close)
                holders = Holders(config, services, store, self.telemetry)
                self._engine.on_host_away(holders.host_away)
                await undo.enter_async_context(running(holders.watch, trainers.failure))
                await episodes.start(services)
                await holders.start()
                return await self._train(services, episodes, trainers, generators, best)

    async def _train(
        self,
        services: RunServices,
        episodes: RunEpisodes,
        trainers: TrainerProcesses,
        generators: Generators,
        best: BestVersion,
    ) -> RunResult:
        config = self._config
        position, _ = await together(trainers.start, generators.start)
        buffer = ReplayBuffer.from_state(_saved_buffer(position) or BufferState(rule=staleness_rule(config)))
        if self._before:
            self.telemetry.emit(RunResumed(time=self.telemetry.now(), step=position.step))
        self._done = position.step
        evaluation = HeldOutEvaluation(
            partial(episodes.play_held_out, generators.generate),
            config.evaluation.every if episodes.has_held_out else 0,
            best,
            self.telemetry.emit,
            self._best_before(position.step),
            self.telemetry.now,
        )

        reached = -1

        async def serve(version: int) -> None:
            """Switch the generators to `version`, once no evaluation needs the one before."""
            nonlocal reached
            if version <= reached:  # the one before was not there
                return
            await evaluation.settle()
            reached = await generators.advance(version)
            buffer.serve(reached)
            await evaluation.begin(reached)

        try:
            await serve(position.step)
            async with self._collecting(services, trainers):
                episode, train = partial(episodes.add_next, generators.generate, buffer), partial(self._step, trainers)
                steps = range(position.step, config.steps, config.algorithm.updates)
                if config.algorithm.mode == "synchronous":
                    await synchronous(episode, buffer, train, serve, steps)
                else:
                    await asynchronous(episode, buffer, train, serve, steps, config.algorithm.concurrency)
                await evaluation.settle()
                digest = await trainers.group.finished(config.steps)
        finally:
            await evaluation.stop()
        return RunResult(digest=digest, steps=config.steps, seconds=self.telemetry.now(), best=evaluation.best)

    async def _step(self, trainers: TrainerProcesses, batch: Batch) -> StepReport:
        """Train a batch; returns once the new weights are committed."""
        faultpoints.reach("loop.before_step", batch.step, -1, 0)
        with self.telemetry.doing("driver", "driver", "train", batch.step):
            report = await trainers.group.step(batch)
        faultpoints.reach("loop.after_step", batch.step, -1, 0)
        self._trained(batch, report)
        faultpoints.reach("loop.after_update", batch.step, -1, 0)
        return report

    @contextlib.asynccontextmanager
    async def _collecting(self, services: RunServices, trainers: TrainerProcesses) -> AsyncIterator[None]:
        """Collect what all processes do during the block, and keep the file of `holdfast top` and the metrics."""

        async def say(ended: bool = False) -> None:
            status = RunStatus(
                time=time.time(),
                driver=os.getpid(),
                step=self._done,
                steps=self._config.steps,
                trainers=await trainers.statuses(),
                services=services.status(),
                ended=ended,
                host="" if self._config.engine.hosts else this_host(),
            )
            self._directory.write_status(status)

        with service_metrics(os.environ.get(PORT, ""), services.status):
            async with self.telemetry.collecting(services.asks(), say):
                yield
        await say(ended=True)

    # -- what happens in the loop

    def _trained(self, batch: Batch, report: StepReport) -> None:
        """Record a batch that is committed."""
        episodes = [each for group in batch.groups for each in group.episodes]
        now = self.telemetry.now()
        self._done = report.version
        self.telemetry.emit(
            StepTrained(
                time=now,
                step=batch.step,
                reward=sum([each.reward for each in episodes]) / len(episodes),
                loss=report.figures["loss"],
                gradient_norm=report.figures["gradient_norm"],
                tokens=sum([sum(each.mask) for each in episodes]),
                staleness=batch.staleness,
                epoch=int(report.figures["epoch"]),
                size=int(report.figures["trainers"]),
                prompts=tuple(group.prompt.number for group in batch.groups),
                updates=report.version - batch.step,
            )
        )
        for group in batch.groups[: -(-self._config.telemetry.episodes // self._config.sampling.group)]:
            self._directory.append_group(group)

    def _best_before(self, step: int) -> Evaluated | None:
        """The best evaluation of the drivers before, up to a step."""
        scores = [each for each in self._before if isinstance(each, Evaluated) and each.version <= step and each.best]
        return scores[-1] if scores else None


def _saved_buffer(position: TrainerPosition) -> BufferState | None:
    """The replay buffer that was saved with a step; None at the first one. Raises `RunFailed`."""
    state = position.buffer
    if position.step and (state is None or state.batch * state.rule.updates != position.step):
        of = "none" if state is None else f"that of step {state.batch * state.rule.updates}"
        raise RunFailed(
            f"the checkpoint of step {position.step} has {of} as its replay buffer, so prompts would be skipped or "
            "repeated; delete that checkpoint, to go on from the one before"
        )
    return state
