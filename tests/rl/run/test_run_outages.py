"""A run outlives rewards that end their process, and a register that is away for seconds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.rl.config.load import parse_config
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import EpisodeFailed, Event, ProcessLost, StepTrained
from support.rl.training_runs import run

pytestmark = pytest.mark.timeout(300)

STEPS = 12
AWAY_SECONDS = 4.0
"""More than any wait of the roles that is no wait for the register."""

REWARDS = """
import os, sys

def ends(answer):
    if answer.prompt.number % 4 == 1:
        sys.exit()
    if answer.prompt.number == 6:
        os._exit(0)
    return float(answer.text.strip() == answer.prompt.answer)
"""
TEXT = """
steps = {steps}
[algorithm]
groups = 4
[sampling]
group = 2
max_new_tokens = 2
[[reward]]
kind = "python"
function = "{rewards}:ends"
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


class Outage:
    """An observer that moves the files of the run's register away at a step, and back after some seconds."""

    def __init__(self, directory: Path, step: int) -> None:
        self.over = threading.Event()
        self._directory, self._step = directory, step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTrained) and event.step == self._step:
            (folder,) = self._directory.glob("job-*")
            files = list(folder.glob("register.sqlite*"))
            for file in files:
                file.rename(file.with_name(f"away-{file.name}"))
            threading.Timer(AWAY_SECONDS, self._end, (files,)).start()

    def _end(self, files: list[Path]) -> None:
        for file in files:
            file.with_name(f"away-{file.name}").rename(file)
        self.over.set()


def test_no_reward_and_no_outage_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    config = parse_config(TEXT.format(steps=STEPS, rewards=tmp_path / "rewards.py"), "test")
    outage = Outage(tmp_path / "run", 3)
    assert run(config, tmp_path / "run", outage).steps == STEPS
    assert outage.over.is_set(), "the run has waited for its register"
    events = list(RunDirectory(tmp_path / "run").events())
    assert [each.step for each in events if isinstance(each, StepTrained)] == list(range(STEPS))
    assert not [each for each in events if isinstance(each, ProcessLost)]
    failed = [each for each in events if isinstance(each, EpisodeFailed)]
    assert failed and {each.prompt for each in failed} <= {6, *range(1, 400, 4)}
    reasons = {each.prompt: each.reason for each in failed}
    assert "SystemExit" in reasons[1]
    assert "its process ended" in reasons[6]
