"""`holdfast demo --hosts 3`: a host of a run is lost. Its trainers, calls and copies are others' from then on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.harness.chaos.outcome.compare import load_report
from holdfast.harness.chaos.outcome.training import COPIES, PROMPTS, STEPS, VERSIONS
from holdfast.harness.chaos.scenario import library
from holdfast.harness.chaos.scenario.scenario import BadScenario, parse, text_of
from holdfast.harness.cli.app import app
from holdfast.harness.testbed import netns

SCENARIO = "rl-host-lost"
SHORT = 12

needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")


@pytest.mark.thorough
@needs_monarch
@pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["ucx", "gloo"])
def test_a_host_of_a_run_is_lost_and_nothing_with_it(tmp_path: Path, backend: str) -> None:
    command = [sys.executable, "-m", "holdfast.harness.cli.app", "demo", "--hosts", "3", "--steps", str(SHORT)]
    command += ["--backend", backend, "--json", "--report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["passed"] and summary["violations"] == [] and summary["steps"] == SHORT
    assert summary["looked"][STEPS] == SHORT and summary["looked"][PROMPTS] == 32 * SHORT
    assert summary["looked"][VERSIONS] > SHORT and summary["looked"][COPIES] > 0
    (run,) = load_report(tmp_path).runs
    assert run.backend == backend
    (loss,) = run.host_losses
    assert {name.split("-")[0] for name in loss.processes} == {"trainer", "generator", "holder"}
    assert loss.step is not None and loss.answer is not None and loss.copies is not None, loss
    gone = {life.name for life in run.lives if life.fate == "killed"}
    assert gone == set(loss.processes)
    page = (tmp_path / "report.html").read_text()
    assert "Host lost to next step" in page and f"holdfast demo --seed 0 --steps {SHORT} --hosts 3" in page


@needs_monarch
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--hosts", "3"), "it takes root"), (("--backend", "gloo"), "--backend is for several hosts")],
)
def test_hosts_that_cannot_be_are_refused_before_anything_starts(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["demo", *arguments, "--report", str(tmp_path)])
    assert done.exit_code == 2 and words in done.output, done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("hosts = 3\n", ""), "host-lost needs job.hosts"),
        (('"host-lost"', '"host-lost"\nhost = 3'), "host = 3: there are hosts 0 to 2"),
        (('"host-lost"', '"host-lost"\nhost = 0'), "host = 0: the driver is there"),
        (('backend = "ucx"', 'backend = "shm"'), "workload.run.trainer.backend: shm is memory of one host"),
        (("silence = 3.0", 'kind = "local"'), "workload.run.engine.hosts: the local engine"),
    ],
)
def test_what_a_run_on_hosts_cannot_have_is_refused(change: tuple[str, str], words: str) -> None:
    text = text_of(library.path_of(SCENARIO))
    assert change[0] in text
    with pytest.raises(BadScenario) as refused:
        parse(text.replace(*change), "test", "test.toml")
    assert words in str(refused.value)
