"""A run that a signal ends leaves no process, says so in one line, and goes on later."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import ProcessStarted
from support.source_tree import ROOT
from support.waiting import next_line

pytestmark = pytest.mark.thorough

SMALL = ("model.warmup_steps=0", "evaluation.every=0", "trainer.spares=0", "trainer.replicas=1", "engine.kind=local")


@pytest.mark.parametrize(
    ("number", "after", "status"), [(signal.SIGINT, "starting 1 trainer", 130), (signal.SIGTERM, "step ", 143)]
)
def test_a_signal_ends_a_run_and_all_its_processes(
    tmp_path: Path, number: signal.Signals, after: str, status: int
) -> None:
    sets = [argument for each in SMALL for argument in ("--set", each)]
    example = ROOT / "examples" / "rl" / "arithmetic.toml"
    command = [sys.executable, "-P", "-m", "holdfast.harness.cli.app", "rl", "train", example, "-d", tmp_path / "run"]
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
