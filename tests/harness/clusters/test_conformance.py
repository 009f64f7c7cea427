"""The conformance kit: its failure checks on our own backends, its command, and its checks of an example plugin."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from holdfast.harness.cli.new_plugin import files
from holdfast.harness.conformance.failures import *  # noqa: F403
from holdfast.harness.conformance.helpers import leaks
from support.programs.forked_programs import run_holdfast, run_python, said, write_plugins
from support.source_tree import ROOT


def conformance(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`holdfast conformance ...`, in a folder that has nothing to do with this project's tests."""
    environ = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    return run_holdfast("conformance", *arguments, cwd=Path("/"), environ=environ, timeout=300)


def test_a_backend_that_passes_gives_status_0_and_every_outcome_as_json() -> None:
    done = conformance("--backend", "inproc", "-n", "2", "-k", "broadcast or killed", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and report["backend"] == "inproc"
    outcomes = {check["check"]: check for check in report["checks"]}
    assert outcomes["broadcast"]["outcome"] == "passed"
    killed = [check for name, check in outcomes.items() if name.startswith("a_killed_rank")]
    assert killed and all(check["outcome"] == "skipped" and "threads" in check["why"] for check in killed)


FORGETFUL = """
from dataclasses import replace
from holdfast.backends.inproc import transport as inproc
from holdfast.comms.plugins.spec import hookimpl

class Forgetful(inproc.InprocTransport):
    def broadcast(self, tensor, src, deadline):
        super().broadcast(tensor.clone(), src, deadline)

def connect(context):
    transport = inproc.connect(context)
    transport.__class__ = Forgetful
    return transport

@hookimpl
def holdfast_backends():
    return [replace(inproc.holdfast_backends()[0], name="forgetful", connect=connect)]
"""


def test_a_backend_that_breaks_a_promise_fails(tmp_path: Path) -> None:
    write_plugins(tmp_path, forgetful=FORGETFUL)
    done = conformance("--backend", "forgetful", "-k", "test_broadcast or test_gather_and", "--json", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert outcomes == {"broadcast": "failed", "gather_and_scatter": "passed"}


def test_what_rounds_leave_behind_is_named_and_what_is_made_once_is_not(tmp_path: Path) -> None:
    """A file, a socket and a thread in each round; a library's own file is opened in the first."""
    over, ports = threading.Event(), list[int]()
    with contextlib.ExitStack() as undo:
        undo.callback(over.set)

        def turn(number: int) -> None:
            if number == 0:
                undo.enter_context((tmp_path / "made once").open("w"))
            undo.enter_context((tmp_path / f"log-{number}").open("w"))
            listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(listener.getsockname()[1])
            threading.Thread(target=over.wait, name=f"holdfast-forgotten-{number}", daemon=True).start()

        descriptors, threads = leaks(turn, 3, "no such map")
        assert descriptors.startswith("6 descriptors more after 3 rounds: ")
        assert all(f"log-{number})" in descriptors for number in (2, 3, 4))
        assert all(f"AF_INET at ('127.0.0.1', {port})" in descriptors for port in ports[2:])
        assert "made once" not in descriptors and "log-0" not in descriptors
        assert "holdfast-forgotten-2" in threads and "holdfast-forgotten-0" not in threads
        assert leaks(lambda number: None, 3, "no such map") == []


# -- holdfast new-plugin: the package that it writes installs, is found, and passes the kit


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put on PYTHONPATH, into which pip has installed a package that the command wrote."""
    folder = tmp_path_factory.mktemp("plugin")
    with contextlib.chdir(folder):
        done = said("new-plugin", "paper_mail")
    assert done.exit_code == 0, done.output
    for line in ("pip install -e holdfast-paper-mail", "holdfast backends", "pytest holdfast-paper-mail"):
        assert f"    {line}\n" in done.stdout, "it says what to do next"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", folder / "site")
    run_python("-m", "pip", "install", *options, folder / "holdfast-paper-mail")
    return folder / "site"


def test_the_backends_of_the_package_are_found(installed: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = run_holdfast("backends", "--json", cwd=installed, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    described = json.loads(done.stdout)
    assert described["backends"]["paper_mail"]["available"] is True
    assert described["broken"] == {}


@pytest.mark.thorough
def test_the_test_of_the_package_runs_the_conformance_kit_which_it_passes(installed: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_holdfast_paper_mail.py"
    test.write_text(files("paper_mail")[test.name])
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    check = ("-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert "skipped" not in run_python(*check, cwd=tmp_path, environ=environ, timeout=290.0)


@pytest.mark.thorough
def test_the_package_is_formatted_and_typed(tmp_path: Path) -> None:
    for file, text in files("filebox").items():
        (tmp_path / file).write_text(text)
    for tool in (["ruff", "check", "--extend-ignore", "INP001"], ["ruff", "format", "--check"], ["mypy"]):
        configured = ["--config", str(ROOT / "pyproject.toml")] if tool[0] == "ruff" else []
        modules = map(str, tmp_path.glob("*.py"))
        run_python("-m", *tool, *configured, *modules, cwd=ROOT)


def test_a_name_with_that_of_the_template_in_it_is_written_once() -> None:
    written = files("my_filebox")
    assert sorted(written) == ["holdfast_my_filebox.py", "pyproject.toml", "test_holdfast_my_filebox.py"]
    assert 'my_filebox = "holdfast_my_filebox"' in written["pyproject.toml"]
    assert "class MyFileboxTransport(" in written["holdfast_my_filebox.py"]


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    done = said("new-plugin", "paper_mail", "--directory", tmp_path)
    assert done.exit_code == 2
    assert "exists: name a folder that does not" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert said("new-plugin", "paper_mail", "--directory", tmp_path / "mine" / "below").exit_code == 2
