"""What the driver of a run imports, and when: the first second of a run is made of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
steps = 1
[model]
warmup_steps = 1
warmup_batch = 8
[algorithm]
mode = "synchronous"
groups = 2
staleness = 0
[sampling]
group = 2
max_new_tokens = 2
batch = 2
[trainer]
replicas = 1
spares = 0
units = 1
strategy = "ddp"
[generator]
replicas = 1
[store]
holders = 1
copies = 1
[engine]
kind = "local"
[evaluation]
every = 1
prompts = 4
"""

RUN = """
import sys
from pathlib import Path
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.load import load_config
train_here(load_config(Path("run.toml")), Path("run"))
print("transformers" in sys.modules)
"""

COMMAND = """
import sys
from holdfast.ft.processes import zygote_start
from holdfast.harness.cli.app import app

def started(*modules):
    print("transformers.models.llama.modeling_llama" in modules, "torch" in sys.modules)
    raise SystemExit(5)

zygote_start.start_early = started
app(sys.argv[1:])
"""


@pytest.mark.thorough
def test_the_driver_of_a_whole_run_does_not_import_transformers(tmp_path: Path) -> None:
    """Its model is read, warmed up, and kept when it is the best, without the seconds that this import takes."""
    (tmp_path / "run.toml").write_text(CONFIG)
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split() == ["False"], done.stdout + done.stderr
    assert (tmp_path / "run" / "policy" / "config.json").is_file()
    best = next((tmp_path / "run" / "best").glob("*/config.json"))
    assert best.read_bytes() == (tmp_path / "run" / "policy" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [
        ("rl train nothing.toml", ["True", "False"]),
        ("rl resume nothing", ["True", "False"]),
        ("rl train nothing.toml --dry-run", []),
        ("demo", ["True", "False"]),
        ("chaos run rl-demo", ["False", "False"]),
    ],
)
def test_a_command_starts_its_zygote_before_it_imports_torch(tmp_path: Path, arguments: str, begun: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments.split()], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.split() == begun, done.stdout + done.stderr
    assert done.returncode == (5 if begun else 2), done.stderr
