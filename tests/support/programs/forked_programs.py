"""Runs Python programs in processes forked from the zygote, which has imported torch: 0.1 s instead of 2.5.

For tests of what a program does, not of how an interpreter starts, for which there is `run_python`. A program has its
own process group, environment, directory, `__main__` and exit status; only modules that the zygote has imported are
imported already.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from typer.testing import CliRunner, Result

from holdfast.comms.plugins.registry import registry
from holdfast.ft.processes.zygote_client import ForkedProcess, zygote
from holdfast.harness.cli.app import app
from support.source_tree import TESTS
from support.waiting import PROGRAM_SECONDS

HOLDFAST = Path(sys.executable).parent / "holdfast"


OUTPUTS = ("before", "stdout", "stderr")


class ForkedProgram(AbstractContextManager["ForkedProgram"]):
    """A program that runs until it ends, or its context does."""

    def __init__(self, text: str, arguments: Sequence[str], cwd: Path | None, environ: Mapping[str, str]) -> None:
        """Run `text` with `sys.argv` of `arguments`, of which the first is the name of its file."""
        self.arguments = arguments
        self._folder = Path(tempfile.mkdtemp())
        files = str(self._folder / "stdout"), str(self._folder / "stderr")
        directory = str(Path.cwd() if cwd is None else cwd)

        def program(_: Any) -> NoReturn:
            _run(text, list(arguments), directory, dict(environ), *files)

        try:
            self._process: ForkedProcess = zygote().spawn(
                program, name=arguments[0], output=self._folder / "before", threads=1
            )
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def communicate(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its status and output. Raises `TimeoutError` if it has not ended in time."""
        status = self._process.wait(timeout).status
        assert status is not None, "the zygote died"
        said = [path.read_text() if path.exists() else "" for path in map(self._folder.joinpath, OUTPUTS)]
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess([*self.arguments], code, said[1], said[0] + said[2])

    def __exit__(self, *_: object) -> None:
        self._process.close()
        shutil.rmtree(self._folder)


def run_forked(
    text: str,
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = PROGRAM_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run the text of a program to its end, in this process's environment unless `environ` is given."""
    with ForkedProgram(text, arguments, cwd, os.environ if environ is None else environ) as program:
        return program.communicate(timeout)


def run_program(
    *command: str | Path,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = PROGRAM_SECONDS,
) -> str:
    """Run a program that must succeed; what it wrote to stdout."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


run_python = partial(run_program, sys.executable)
"""Run an interpreter of its own."""


def run_holdfast(
    *arguments: str | Path,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = PROGRAM_SECONDS,
) -> subprocess.CompletedProcess[str]:
    program = [str(HOLDFAST), *map(str, arguments)]
    return run_forked(HOLDFAST.read_text(), program, cwd=cwd, environ=environ, timeout=timeout)


def said(*arguments: object, **environ: str) -> Result:
    """Run the command in this process: wide, without colours, and for what has no process of its own to show."""
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", **environ}).invoke(app, [*map(str, arguments)])


def said_as_json(*arguments: str | Path, status: int = 0, **environ: str) -> Any:
    """What the command prints with `--json`, which has to end with this status."""
    done = said(*arguments, "--json", **environ)
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def script(folder: Path, text: str) -> str:
    """The path of a file with this program, for a command that takes one."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def write_plugins(folder: Path, **sources: str) -> None:
    """Write a package with these plugins as modules, which programs with the folder on PYTHONPATH find."""
    for name, source in sources.items():
        (folder / f"plugin_{name}.py").write_text(textwrap.dedent(source))
    info = folder / "plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[holdfast]", *(f"{name} = plugin_{name}" for name in sources)]))


def _run(
    text: str, arguments: list[str], directory: str, environ: dict[str, str], stdout: str, stderr: str
) -> NoReturn:
    """What an interpreter does, from its start to its end."""
    for standard, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, standard)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    sys.argv[:] = arguments
    first = [str(Path(arguments[0]).absolute().parent), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = first + [entry for entry in sys.path if entry and not Path(entry).is_relative_to(TESTS)]
    registry.cache_clear()  # a module that the zygote preloaded may have looked for plugins, on another path
    main = types.ModuleType("__main__")
    main.__file__ = arguments[0]
    sys.modules["__main__"] = main
    status = 1
    try:
        exec(compile(text, arguments[0], "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
