"""Whole runs in the event loop of a test, small ones, and an observer that kills their processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from holdfast.harness.training import PRELOAD
from holdfast.rl.actors.engine import Engine, LocalEngine
from holdfast.rl.config.run_config import RunConfig
from holdfast.rl.config.toml import parse_config
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Event, ProcessLost, ProcessStarted, StepTrained
from holdfast.rl.run.training_run import RunResult, TrainingRun
from support.programs.forked_programs import said

Watch = Callable[[Event], None]

SMALL = """
steps = 3
[algorithm]
mode = "synchronous"
groups = 4
staleness = 0
[sampling]
group = 4
max_new_tokens = 2
[trainer]
replicas = 1
spares = 0
strategy = "ddp"
[generator]
replicas = 1
[store]
holders = 1
copies = 1
[engine]
kind = "local"
[evaluation]
every = 0
"""
"""The configuration of a run with one process of each role."""
SPARED: dict[str, object] = {
    "model__warmup_steps": 4,
    "model__warmup_batch": 64,
    "algorithm__groups": 8,
    "sampling__batch": 4,
    "trainer__replicas": 2,
    "trainer__spares": 1,
    "generator__replicas": 2,
    "store__holders": 2,
    "store__copies": 2,
    "evaluation__prompts": 16,
}
"""What gives each role a process more than it needs, and the run something to learn."""


def configured(more: str = "", **overrides: object) -> RunConfig:
    """`SMALL` with more tables, and with overrides such as `trainer__replicas=2`."""
    return parse_config(
        SMALL + more, "test", [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    )


def run(
    config: RunConfig, directory: Path, watch: Watch = lambda _: None, engine: Callable[..., Engine] = LocalEngine
) -> RunResult:
    """Do a whole run in this process's event loop."""

    async def body() -> RunResult:
        async with asyncio.timeout(240.0), engine(preload=PRELOAD) as started:
            return await TrainingRun(config, opened, started, (watch,)).run()

    with RunDirectory(directory).open() as opened:
        return asyncio.run(body())


invoke = partial(said, COLUMNS="240")
"""What a command of `holdfast` prints, and its exit code. The path of a test's folder breaks no line."""


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
