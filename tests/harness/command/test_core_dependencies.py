"""Every command where holdfast is installed without extras: it works, or says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from holdfast.harness.cli.app import app
from holdfast.harness.command_line import CANNOT_BEGIN, plain_brackets

pytestmark = pytest.mark.timeout(300)

COMMANDS = {
    "backends": 0,
    "bench all_reduce --backends inproc -n 2 --sizes 8 --json": 0,
    "bench copy --report figures": CANNOT_BEGIN,
    "bench store --workloads model --size 1M --starts 1 --rounds 1": CANNOT_BEGIN,
    "blame nowhere": 1,
    "chaos list": 0,
    "chaos run kill-rank --report here": CANNOT_BEGIN,
    "conformance --backend shm": CANNOT_BEGIN,
    "demo": CANNOT_BEGIN,
    "gate HEAD~1 HEAD": CANNOT_BEGIN,
    "new-plugin mine": 0,
    "rl environment": CANNOT_BEGIN,
    "rl report run": CANNOT_BEGIN,
    "rl train task.toml": CANNOT_BEGIN,
    "run -n 1 nowhere.py": CANNOT_BEGIN,
    "simulate --seeds 2": 0,
    "store ls sqlite:///nowhere/job.sqlite": CANNOT_BEGIN,
    "top": CANNOT_BEGIN,
    "tune --help": 0,
}
"""What is started, and its exit status."""

PROGRAM = """
import importlib.machinery, importlib.metadata as metadata, io, json, os, re, sys

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

wanted, core = ["holdfast"], set()
while wanted:
    if (name := canonical(wanted.pop())) not in core:
        core.add(name)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wanted += [re.match(r"[\\w.-]+", line)[0] for line in lines if "extra ==" not in line]
modules = metadata.packages_distributions()
absent = {module for module, names in modules.items() if not core & set(map(canonical, names))}
absent -= {"setuptools", "pip", "_distutils_hack", "pkg_resources"}

class CoreOnly(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = CoreOnly

import torch  # here, once for all forks

from holdfast.harness.cli.app import main

for number, command in enumerate(json.loads(sys.argv[1])):
    if not (pid := os.fork()):
        out = os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = ["holdfast", *command.split()]
        status = 0
        try:
            main()
        except SystemExit as exit:
            status = exit.code or 0
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit status and output of each command, started in forks of one process that finds core dependencies only."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "task.toml").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(COMMANDS))],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    assert not (folder / "figures").exists(), "it is said before anything is measured or written"
    texts = [(folder / f"{number}.txt").read_text() for number in range(len(COMMANDS))]
    return dict(zip(COMMANDS, zip(map(int, done.stdout.split()), texts, strict=True), strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_or_says_what_to_install(ended: dict[str, tuple[int, str]], command: str) -> None:
    status, output = ended[command]
    assert status == COMMANDS[command], output
    assert "Traceback" not in output
    if "not installed" in output:
        assert "pip install 'holdfast[" in output


def test_every_command_is_started() -> None:
    assert set(typer.main.get_group(app).commands) - {"chaos", "rl"} <= {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pip install 'holdfast[rl]'", "pip install 'holdfast\\[rl]'"),
        ("[bold]Examples[/bold]", "[bold]Examples[/bold]"),
    ],
)
def test_help_keeps_words_in_brackets(text: str, shown: str) -> None:
    assert plain_brackets(text) == shown
