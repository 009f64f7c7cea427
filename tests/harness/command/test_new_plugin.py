"""`holdfast new-plugin`: the package that it writes installs, is found, and passes the conformance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.harness.cli.app import app
from holdfast.harness.cli.new_plugin import files
from support.programs.forked_programs import run_holdfast
from support.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "plugin-backend"


def new_plugin(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["new-plugin", *map(str, arguments)])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on PYTHONPATH, into which pip has installed a package that the command wrote."""
    folder = tmp_path_factory.mktemp("plugin")
    done = new_plugin("paper_mail", "--directory", folder / "source")
    assert done.exit_code == 0, done.output
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder / "source")], check=True, timeout=100)
    return folder / "site"


def test_the_backends_of_the_package_are_found(installed: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = run_holdfast("backends", "--json", cwd=installed, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    described = json.loads(done.stdout)
    assert described["backends"]["paper_mail"]["available"] is True
    assert described["broken"] == {}


@pytest.mark.thorough
def test_the_test_of_the_package_runs_the_conformance_kit(installed: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_holdfast_paper_mail.py"
    test.write_text(files("paper_mail")[test.name])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "killed and not all_reduce", str(test)],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_example_in_the_repository_is_what_the_command_writes(tmp_path: Path) -> None:
    done = new_plugin("filebox", "--directory", tmp_path / "new")
    assert done.exit_code == 0, done.output
    written = {path.name: path.read_text() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_text() for path in EXAMPLE.iterdir() if path.is_file()}


def test_it_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = new_plugin("paper_mail")
    assert (tmp_path / "holdfast-paper-mail" / "holdfast_paper_mail.py").is_file()
    for line in ("pip install -e holdfast-paper-mail", "holdfast backends", "pytest holdfast-paper-mail"):
        assert f"    {line}\n" in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("shm", "there is a backend shm already"),
        ("registers", "there is a plugin registers already"),
        ("Mine", "'Mine' is no identifier of lower-case letters"),
        ("2fast", "no identifier"),
        ("../mine", "no identifier"),
        ("class", "no identifier"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, said: str, tmp_path: Path) -> None:
    done = new_plugin(name, "--directory", tmp_path / "new")
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    done = new_plugin("paper_mail", "--directory", tmp_path)
    assert done.exit_code == 2
    assert "exists: name a folder that does not" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert new_plugin("paper_mail", "--directory", tmp_path / "mine" / "below").exit_code == 2
