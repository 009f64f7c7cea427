"""`holdfast demo`: a run on Monarch recovers from faults in every role, reports them, and ends in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.harness.chaos.outcome.record import load_report
from holdfast.harness.chaos.outcome.training import COPIES, PROMPTS, VERSIONS
from holdfast.harness.chaos.outcome.training import STEPS as COMMITTED
from holdfast.harness.chaos.scenario import BadScenario, parse, scenario_path, text_of
from holdfast.harness.testbed import netns
from support.programs.forked_programs import run_python, said
from support.waiting import PROGRAM_SECONDS, becomes_true

pytestmark = pytest.mark.timeout(400)
needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'")

STEPS = 24


def command(*arguments: str) -> list[str]:
    return ["-m", "holdfast.harness.cli.app", "demo", *arguments]


def demonstrated(*arguments: str, folder: Path) -> dict[str, Any]:
    """What a demo prints that held, with its report in a folder."""
    asked = command(*arguments, "--json", "--report", str(folder))
    summary: dict[str, Any] = json.loads(run_python(*asked, timeout=350.0))
    assert summary["passed"] and summary["violations"] == []
    return summary


@pytest.mark.thorough
@needs_monarch
def test_every_role_is_struck_and_recovers_nothing_is_lost_and_the_report_shows_it(tmp_path: Path) -> None:
    """A short run with all faults."""
    summary = demonstrated("--steps", str(STEPS), "--seed", "3", folder=tmp_path)
    assert summary["steps"] == STEPS
    assert summary["looked"][PROMPTS] == 64 * STEPS
    struck = [fault["process"].split("-")[0] for fault in summary["faults"]]
    assert struck == ["trainer", "generator", "environment", "holder", "environment"]
    assert summary["faults"][-1]["process"].split(", ")[1].startswith("generator-"), "and a generator at the same time"
    for fault in summary["faults"]:
        times = list(fault["recovery"].values())
        assert next(iter(fault["recovery"])) == "detected", fault
        assert times == sorted(times)
    page = (tmp_path / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "What was learnt" in page and "Policy tokens a second" in page
    assert "rl-demo-episodes.html" in page
    assert "holdfast demo --seed 3 --steps 24" in page
    assert "class=" in (tmp_path / "rl-demo-episodes.html").read_text()
    (run,) = load_report(tmp_path).runs
    assert {life.role for life in run.lives} >= {"driver", "trainer", "generator", "holder", "environment"}
    assert {span.process for span in run.spans} <= {life.name for life in run.lives}


@pytest.mark.thorough
@needs_monarch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, short: Path, number: int) -> None:
    environ = {**os.environ, "TMPDIR": str(short)}
    with subprocess.Popen(
        [sys.executable, *command("--steps", "100000", "--report", str(tmp_path / "report"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready after" in line:
                break
        descendants = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        assert len(descendants) >= 4
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(PROGRAM_SECONDS) == (130 if number == signal.SIGINT else 128 + number), output
    assert becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants))
    assert not list(short.glob("holdfast-chaos*"))


# -- on three hosts, one of which is lost


SCENARIO = "rl-host-lost"
SHORT = 12


@pytest.mark.thorough
@needs_monarch
@pytest.mark.skipif(netns.missing() is not None, reason=f"network namespaces: {netns.missing()}")
@pytest.mark.parametrize("backend", ["ucx", "gloo"])
def test_a_host_of_a_run_is_lost_and_nothing_with_it(tmp_path: Path, backend: str) -> None:
    asked = ("--hosts", "3", "--steps", str(SHORT), "--backend", backend)
    summary = demonstrated(*asked, folder=tmp_path)
    assert summary["steps"] == SHORT
    assert summary["looked"][COMMITTED] == SHORT and summary["looked"][PROMPTS] == 32 * SHORT
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
    [
        (("--steps", "0"), "steps"),
        (("--hosts", "3"), "it takes root"),
        (("--backend", "gloo"), "--backend is for several hosts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = said("demo", "--report", tmp_path, *arguments)
    assert done.exit_code == 2 and words in done.stderr, done.output
    assert not (tmp_path / "run.json").exists()


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
    text = text_of(scenario_path(SCENARIO))
    assert change[0] in text
    with pytest.raises(BadScenario) as refused:
        parse(text.replace(*change), "test", "test.toml")
    assert words in str(refused.value)
