"""Whole runs in the event loop of a test, and an observer that kills their processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.harness.training.preload import PRELOAD
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.engine.engine import Engine
from holdfast.rl.engine.local import LocalEngine
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, ProcessLost, ProcessStarted, StepTrained
from holdfast.rl.run.training_run import RunResult, TrainingRun

Watch = Callable[[Event], None]


def run(
    config: RunConfig, directory: Path, watch: Watch = lambda _: None, engine: Callable[..., Engine] = LocalEngine
) -> RunResult:
    """Do a whole run in this process's event loop."""

    async def body() -> RunResult:
        async with asyncio.timeout(240.0), engine(preload=PRELOAD) as started:
            return await TrainingRun(config, opened, started, (watch,)).run()

    with RunDirectory(directory).open() as opened:
        return asyncio.run(body())


class Killer:
    """An observer that sends signals to processes of a role when steps are trained."""

    def __init__(self, plan: Mapping[int, tuple[str, int]]) -> None:
        self.plan, self.struck, self.lost = dict(plan), list[str](), set[str]()
        self._alive: dict[str, ProcessStarted] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case ProcessStarted():
                self._alive[event.name] = event
            case ProcessLost():
                self.lost.add(event.name)
                self._alive.pop(event.name, None)
            case StepTrained() if event.step in self.plan:
                role, number = self.plan.pop(event.step)
                victim = next(each for each in self._alive.values() if each.role == role)
                self.struck.append(victim.name)
                os.kill(victim.pid, number)
            case _:
                return
