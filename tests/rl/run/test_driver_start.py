"""What the driver of a run imports, and when: the first second of a run is made of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.rl.config.toml import resolved
from support.rl.training_runs import configured

RUN = """
import sys
from pathlib import Path
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.toml import load_config
train_here(load_config(Path("run.toml")), Path("run"))
print("transformers" in sys.modules)
"""

COMMAND = """
import sys
from holdfast.ft.processes import zygote_start
from holdfast.harness.cli.app import app

def started(*modules):
    print("transformers.models.llama.modeling_llama" in modules, "torch" in sys.modules, end=" ")
    raise SystemExit(5)

zygote_start.start_early = started
for command in sys.argv[1:]:
    try:
        app(command.split())
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.thorough
def test_the_driver_of_a_whole_run_does_not_import_transformers(tmp_path: Path) -> None:
    """Its model is read, warmed up, and kept when it is the best, without the seconds that this import takes."""
    (tmp_path / "run.toml").write_text(
        resolved(configured(steps=1, model__warmup_steps=1, evaluation__every=1, evaluation__prompts=4))
    )
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split() == ["False"], done.stdout + done.stderr
    assert (tmp_path / "run" / "policy" / "config.json").is_file()
    best = next((tmp_path / "run" / "best").glob("*/config.json"))
    assert best.read_bytes() == (tmp_path / "run" / "policy" / "config.json").read_bytes()


def test_a_command_starts_its_zygote_before_it_imports_torch(tmp_path: Path) -> None:
    """In one interpreter: none of these commands goes further than that, and the last one starts no process."""
    begun = {
        "rl train nothing.toml": "True False 5",
        "rl resume nothing": "True False 5",
        "demo": "True False 5",
        "chaos run rl-demo": "False False 5",
        "rl train nothing.toml --dry-run": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *begun], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.splitlines() == list(begun.values()), done.stdout + done.stderr
