"""The `holdfast rl` commands, run as a user runs them."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.harness.training.driver import run_interruptible
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import ProcessStarted
from support.programs.forked_programs import run_holdfast, said
from support.source_tree import ROOT
from support.waiting import next_line

holdfast = partial(run_holdfast, "rl", timeout=240.0)
EXAMPLE = ROOT / "examples" / "rl" / "arithmetic.toml"


def test_a_dry_run_prints_the_whole_configuration_and_starts_nothing(tmp_path: Path) -> None:
    done = said("rl", "train", EXAMPLE, "-d", tmp_path / "run", "--dry-run", "--set", "trainer.replicas=3")
    assert done.exit_code == 0, done.stderr
    assert "replicas = 3" in done.stdout and "weight_decay" in done.stdout
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_with_a_configuration_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("steps = 0\n[sampling]\ngroup = 1\n[trainer]\nreplica = 3\n")
    done = said("rl", "train", file)
    assert done.exit_code == 2 and not done.stdout
    for place in ("bad.toml:1", "bad.toml:3", "bad.toml:5", "did you mean 'replicas'?"):
        assert place in done.stderr, done.stderr


def test_an_environment_is_served_until_the_command_is_ended() -> None:
    pytest.importorskip("websockets", reason="pip install 'holdfast[rl]'")
    from holdfast.rl.environments.client import EnvironmentClient

    async def first_words(url: str) -> str:
        async with EnvironmentClient(url) as client:
            return (await client.reset(3)).text

    command = [sys.executable, "-P", "-m", "holdfast.harness.cli.app", "rl", "environment", "serve", "guess?high=7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        found = re.search(r"guess\?high=7: (ws://127\.0\.0\.1:\d+), 64 sessions", next_line(serving.stdout))
        try:
            assert found and asyncio.run(first_words(found[1])) == "guess a number from 1 to 7"
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(30.0) == 0


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_run_is_trained_and_gone_on_with_and_its_pages_are_written(tmp_path: Path) -> None:
    """The second command trains the steps that the first was not asked for."""
    run = tmp_path / "run"
    few = ("--set", "checkpoint.every=2", "--set", "evaluation.every=2", "--set", "telemetry.tensorboard=true")
    first = holdfast("train", EXAMPLE, "-d", run, "--set", "steps=4", "--set", "model.warmup_steps=2", *few, "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["steps"] == 4 and len(json.loads(first.stdout)["digest"]) == 32
    assert list((run / "tensorboard").iterdir())
    second = holdfast("resume", run, "--set", "steps=6", "--json")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["steps"] == 6
    pages = holdfast("report", run, "--output", tmp_path / "pages")
    assert pages.returncode == 0, pages.stderr
    report, episodes = ((tmp_path / "pages" / name).read_text() for name in ("report.html", "episodes.html"))
    assert "6 steps were committed" in report and "trainer-0" in report and "generator-0" in report
    assert "reference" in episodes


SMALL = ("model.warmup_steps=0", "evaluation.every=0", "trainer.spares=0", "trainer.replicas=1", "engine.kind=local")


def test_ctrl_c_before_the_loop_begins_leaves_no_coroutine_that_was_never_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None: ...

    def interrupted(whole: Coroutine[Any, Any, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    coroutine = work()
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "after", "status"), [(signal.SIGINT, "starting 1 trainer", 130), (signal.SIGTERM, "step ", 143)]
)
def test_a_signal_ends_a_run_and_all_its_processes(
    tmp_path: Path, number: signal.Signals, after: str, status: int
) -> None:
    sets = [argument for each in SMALL for argument in ("--set", each)]
    command = [sys.executable, "-P", "-m", "holdfast.harness.cli.app", "rl", "train", EXAMPLE, "-d", tmp_path / "run"]
    with subprocess.Popen(
        [*command, *sets], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as training:
        assert training.stdout is not None and training.stderr is not None
        seen = ""
        while after not in seen:
            line = next_line(training.stdout)
            assert line, training.stderr.read()
            seen += line
        training.send_signal(number)
        rest, errors = training.communicate(timeout=60.0)
    assert training.returncode == status, errors
    assert not errors.replace("Aborted!", "").replace("Aborted.", "").strip(), errors
    assert "lost" not in rest, rest
    assert ("holdfast rl resume" in rest) == (after == "step ")
    started = [each.pid for each in RunDirectory(tmp_path / "run").events() if isinstance(each, ProcessStarted)]
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
