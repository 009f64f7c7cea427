"""Train by reinforcement with vLLM as the generator: 20 updates on sums of three digits, the generator killed half-way.

`make vllm` runs it, in this project's environment; the generator runs in that of `make extra-vllm`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
from pathlib import Path

from holdfast.rl.actors.engine import LocalEngine
from holdfast.rl.config.toml import parse_config
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import Evaluated, Event, ProcessLost, ProcessStarted, StepTrained, WeightsServed
from holdfast.rl.run.training_run import TrainingRun

STEPS, KILLED_AT = 20, 10
TEXT = f"""
steps = {STEPS}

[model]
warmup_steps = 16

[algorithm]
mode = "asynchronous"
groups = 16
staleness = 1

[sampling]
group = 8
max_new_tokens = 2

[trainer]
replicas = 1
spares = 0

[generator]
kind = "vllm"           # the interpreter is that of `make extra-vllm`; `python` names another one
replicas = 1
on_update = "keep"      # running completions go on with new weights
timeout = 300

[store]
holders = 1
copies = 1

[engine]
kind = "local"

[evaluation]
every = {STEPS}
prompts = 64
"""


class Witness:
    """Keeps the events, and kills the generator once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._pid = 0

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, ProcessStarted) and event.role == "generator":
            self._pid = event.pid
        if isinstance(event, StepTrained) and event.step == KILLED_AT:
            os.kill(self._pid, signal.SIGKILL)


async def train(directory: RunDirectory, witness: Witness) -> float:
    """Do the whole run; returns its seconds."""
    async with LocalEngine() as engine:
        result = await TrainingRun(parse_config(TEXT, "train_arithmetic.py"), directory, engine, (witness,)).run()
    return result.seconds


def main() -> None:
    witness = Witness()
    with tempfile.TemporaryDirectory() as folder, RunDirectory(Path(folder) / "run").open() as directory:
        seconds = asyncio.run(train(directory, witness))
    events = witness.events
    trained = [each for each in events if isinstance(each, StepTrained)]
    lost = [each for each in events if isinstance(each, ProcessLost)]
    again = [each for each in events if isinstance(each, ProcessStarted) and each.replaces]
    served = [each.seconds for each in events if isinstance(each, WeightsServed)]
    scores = [each for each in events if isinstance(each, Evaluated) and each.reward is not None]
    rows = [
        ("updates of the weights", f"{len(trained)} in {seconds:.0f} s"),
        ("tokens that vLLM drew for them", f"{sum(each.tokens for each in trained):,}"),
        ("versions behind, at most", str(max(max(each.staleness) for each in trained))),
        ("a version is served after, median", f"{statistics.median(served) * 1e3:.0f} ms"),
        ("generators lost", ", ".join(f"{each.name}: {each.how}" for each in lost)),
        ("replaced after", ", ".join(f"{new.time - old.time:.1f} s" for old, new in zip(lost, again, strict=True))),
        ("held-out reward", ", ".join(f"{each.reward:.2f} at version {each.version}" for each in scores)),
    ]
    for name, value in rows:
        print(f"{name:52} {value}")
    if len(trained) != STEPS or len(again) != 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
