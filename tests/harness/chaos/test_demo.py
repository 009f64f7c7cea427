"""`holdfast demo`: a run on Monarch recovers from faults in every role, reports them, and ends in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.harness.chaos.outcome.compare import load_report
from holdfast.harness.chaos.outcome.training import PROMPTS
from holdfast.harness.cli.app import app
from support.waiting import becomes_true

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'holdfast[rl]'"),
]

STEPS = 24


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.harness.cli.app", "demo", *arguments]


def processes_of(parent: int) -> list[int]:
    """The living descendants of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        pid, (state, above) = int(text.split()[0]), text.rsplit(")", 1)[1].split()[:2]
        if int(above) == parent and state != "Z":
            found += [pid, *processes_of(pid)]
    return found


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A short run with all faults: the printed object, and the report's folder."""
    folder = tmp_path_factory.mktemp("demo") / "report"
    done = subprocess.run(
        command("--steps", str(STEPS), "--json", "--seed", "3", "--report", str(folder)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.thorough
def test_every_role_is_struck_and_recovers_and_nothing_is_lost(demonstrated: tuple[dict[str, Any], Path]) -> None:
    summary, _ = demonstrated
    assert summary["passed"] and summary["violations"] == []
    assert summary["steps"] == STEPS
    assert summary["looked"][PROMPTS] == 64 * STEPS
    struck = [fault["process"].split("-")[0] for fault in summary["faults"]]
    assert struck == ["trainer", "generator", "environment", "holder", "environment"]
    assert summary["faults"][-1]["process"].split(", ")[1].startswith("generator-"), "and a generator at the same time"
    for fault in summary["faults"]:
        times = list(fault["recovery"].values())
        assert next(iter(fault["recovery"])) == "detected", fault
        assert times == sorted(times)


@pytest.mark.thorough
def test_the_report_shows_the_run_and_its_episodes(demonstrated: tuple[dict[str, Any], Path]) -> None:
    _, folder = demonstrated
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "What was learnt" in page and "Policy tokens a second" in page
    assert "rl-demo-episodes.html" in page
    assert "holdfast demo --seed 3 --steps 24" in page
    assert "class=" in (folder / "rl-demo-episodes.html").read_text()
    (run,) = load_report(folder).runs
    assert {life.role for life in run.lives} >= {"driver", "trainer", "generator", "holder", "environment"}
    assert {span.process for span in run.spans} <= {life.name for life in run.lives}


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short path: Monarch's sockets are in there."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, short: Path, number: int) -> None:
    environ = {**os.environ, "TMPDIR": str(short)}
    with subprocess.Popen(
        command("--steps", "100000", "--report", str(tmp_path / "report")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready after" in line:
                break
        descendants = processes_of(process.pid)
        assert len(descendants) >= 4
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(60) == (130 if number == signal.SIGINT else 128 + number), output
    assert becomes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in descendants), 60.0)
    assert not list(short.glob("holdfast-chaos*"))


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--steps", "0"], "steps"), (["--report", "/proc/none"], "no folder to write to")]
)
def test_options_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = CliRunner().invoke(app, ["demo", "--report", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "run.json").exists()
