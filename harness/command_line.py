"""What every `holdfast` command shares: the guard around it, its exit statuses, and checks of its output files.

Output files are checked before the work, and written after the result was printed.

An exit status below 64 is a command's own: its result, or that it could not begin. A command that breaks, is ended by a
signal or cannot write ends with a status from 64 on, so that no script takes a fault of holdfast for a result.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import math
import os
import re
import select
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

Options = TypeVar("Options")

CANNOT_BEGIN = 2
"""Bad options, or a missing requirement."""

INTERNAL_ERROR = 70
"""EX_SOFTWARE: a fault of holdfast."""

NOT_WRITTEN = 74
"""EX_IOERR: the result was printed, and a file could not be written."""

BROKEN_PIPE = 128 + signal.SIGPIPE

MODULES = {"torchmonarch": "monarch"}
"""Names of modules by their distribution, where they are not alike."""


class GuardedCommand(TyperCommand):
    """A command that refuses infinite and NaN options, and exits with a status of its own on internal errors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = plain_brackets(by_paragraph(self.help or ""))
        for parameter in self.params:
            if isinstance(parameter, TyperOption | TyperArgument):
                parameter.help = plain_brackets(parameter.help or "")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value) and value != parameter.get_default(ctx):
                raise typer.BadParameter(f"{value} is not a number to work with", ctx=ctx, param_hint=parameter.opts[0])
        return rest

    def invoke(self, ctx: Any) -> Any:
        with guarded(ctx.command_path):
            return super().invoke(ctx)


class CommandGroup(typer.Typer):
    """A group of commands, all of them guarded."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": GuardedCommand, **options})


def with_options(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Make a function of one object a command: its options are the fields of that dataclass.

    A ValueError of the dataclass is a wrong option.
    """

    def decorate(body: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(body)
        def command(**values: Any) -> None:
            try:
                chosen = options(**values)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            body(chosen)

        hints = get_type_hints(options, include_extras=True)
        signature = inspect.signature(options)
        parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
        command.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return decorate


def names_in(option: str, text: str, example: str) -> tuple[str, ...]:
    """The names in the list that an option gives. Raises ValueError for a list of none: nothing would be done."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError(f"{option} {text!r} names nothing: give one or several, such as {example}")
    return names


def by_paragraph(text: str) -> str:
    """A help text with one line a paragraph, which the terminal wraps; indented lines are examples and stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each if any(line.startswith(" ") for line in each.splitlines()) else each.replace("\n", " ")
        for each in paragraphs
    )


def plain_brackets(text: str) -> str:
    """Help in which only `[bold]` is markup: rich would take the extras of `holdfast[rl]` for a tag, and drop them."""
    return re.sub(r"\[(?!/?bold\])(?=[a-z])", r"\\[", text)


def extra_of(module: str) -> str | None:
    """The smallest extra of holdfast that installs `module`; None for a module that no extra has."""
    extras: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("holdfast") or []:
        if match := re.match(r"""([\w.-]+).*; extra == ['"](\w+)['"]""", line):
            extras.setdefault(match[2], set()).add(MODULES.get(match[1], match[1].replace("-", "_")))
    having = [extra for extra, modules in extras.items() if module.partition(".")[0] in modules]
    return min(having, key=lambda extra: len(extras[extra]), default=None)


@contextmanager
def guarded(command: str) -> Iterator[None]:
    """Turn an unexpected exception into a message and an exit status that is no result."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if _is_ours(error):
            typer.echo(f"{command}: {error}", err=True)
            raise typer.Exit(CANNOT_BEGIN) from error
        if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error.name or "")):
            missing = (error.name or "").partition(".")[0]
            hint = f"pip install 'holdfast[{extra}]'"
            typer.echo(f"{command}: this needs {missing}, which is not installed: {hint}", err=True)
            raise typer.Exit(CANNOT_BEGIN) from error
        if isinstance(error, BrokenPipeError) and stdout_is_closed():
            raise typer.Exit(BROKEN_PIPE) from error
        traceback.print_exc()
        typer.echo(f"{command}: this is a fault of holdfast, and no result; please report it", err=True)
        raise typer.Exit(INTERNAL_ERROR) from error


@contextmanager
def in_one_line(command: str, *kinds: type[Exception], status: int = CANNOT_BEGIN) -> Iterator[None]:
    """Print an error of holdfast, or of these kinds, in one line, and exit with `status`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) or not (isinstance(error, kinds) or _is_ours(error)):
            raise
        typer.echo(f"{command}: {error}", err=True)
        raise typer.Exit(status) from error


def _is_ours(error: Exception) -> bool:
    """Whether `error` is a `HoldfastError`; looked up without an import, because that would load torch."""
    errors = sys.modules.get("holdfast.comms.errors")
    return errors is not None and isinstance(error, errors.HoldfastError)


def stdout_is_closed() -> bool:
    """Whether the reader of stdout has gone. If so, unwritten output is dropped without another error."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        return False
    poller = select.poll()
    poller.register(descriptor, 0)
    if not any(event & select.POLLERR for _, event in poller.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


@contextmanager
def signals_end_in_order() -> Iterator[None]:
    """On SIGTERM and SIGHUP, run every `__exit__` and `finally`, then end the process with 128 + the signal."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Raise BadParameter if a folder `path` (None: none is wanted) cannot be made, or files `names` not written in it.

    What is made to find out is removed: options that are judged later may still be refused.
    """
    if path is None:
        return
    new = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        for name in names:
            check_file(path / name, option)
    except OSError as error:
        raise typer.BadParameter(f"{path} is no folder to write to: {error}", param_hint=option) from error
    finally:
        for each in new:
            with suppress(OSError):  # it was not made
                each.rmdir()


def check_modules(extra: str, what: str, *modules: str) -> None:
    """Raise BadParameter with the install command unless `modules`, which an optional part needs, are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        install = f"pip install 'holdfast[{extra}]'"
        raise typer.BadParameter(f"{what} needs {' and '.join(missing)}, which is not installed: {install}")


@contextmanager
def writing(command: str) -> Iterator[None]:
    """On an OSError, print one line and exit with `NOT_WRITTEN`, which is no result."""
    try:
        yield
    except OSError as error:
        typer.echo(f"{command}: a file could not be written: {error}", err=True)
        raise typer.Exit(NOT_WRITTEN) from error
