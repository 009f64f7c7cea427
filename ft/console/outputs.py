"""Output files of commands: checked before the work, written after the result was printed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import typer

NOT_WRITTEN = 74
"""EX_IOERR: the result was printed, and a file could not be written."""


def check_file(path: Path | None, option: str) -> None:
    """Raise BadParameter with the reason if `path` (None: no output is wanted) cannot be written."""
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():
            if stat.S_ISDIR(path.stat().st_mode):
                raise IsADirectoryError(f"{path} is a folder")
            return  # A pipe or a terminal: opening it may block until it has a reader.
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent}")
        new = not path.exists()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666))
        if new:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error}", param_hint=option) from error


def check_folder(path: Path | None, option: str, *names: str) -> None:
    """Make the folder `path` (None: none is wanted); raise BadParameter if files `names` cannot be written in it."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} is no folder to write to: {error}", param_hint=option) from error
    for name in names:
        check_file(path / name, option)


def check_modules(extra: str, what: str, *modules: str) -> None:
    """Raise BadParameter with the install command unless `modules`, which an optional part needs, are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        install = f"pip install 'holdfast[{extra}]'"
        raise typer.BadParameter(f"{what} needs {' and '.join(missing)}, which is not installed: {install}")


@contextlib.contextmanager
def writing(command: str) -> Iterator[None]:
    """On an OSError, print one line and exit with `NOT_WRITTEN`, which is no result."""
    try:
        yield
    except OSError as error:
        typer.echo(f"{command}: a file could not be written: {error}", err=True)
        raise typer.Exit(NOT_WRITTEN) from error
