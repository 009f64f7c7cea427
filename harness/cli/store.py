"""`holdfast store`: the commands. Nothing heavy is imported until one of them runs."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from holdfast.harness.command_line import CommandGroup, GuardedCommand, in_one_line

NOTHING_TO_VERIFY = 3
"""The exit status of `holdfast store verify` that read no replica: that is no verdict on any byte."""

URL = re.compile(r"[a-z][a-z0-9+.-]*:/")


class StoreCommand(GuardedCommand):
    """A command that also takes its store's URL as an argument, before or after the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        urls = [
            number
            for number, argument in enumerate(args)
            if URL.match(argument) and not (number and args[number - 1] in ("--register", "-r"))
        ]
        if len(urls) > 1:
            raise typer.BadParameter(f"one store at a time: {' and '.join(args[number] for number in urls)}", ctx=ctx)
        for number in urls:
            if any(argument in ("--register", "-r") or argument.startswith("--register=") for argument in args):
                raise typer.BadParameter(f"{args[number]} beside --register: name the store once", ctx=ctx)
            args = ["--register", args[number], *args[:number], *args[number + 1 :]]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[URL]"]


class StoreGroup(CommandGroup):
    """The commands of `holdfast store`."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=StoreCommand, **options)


app = StoreGroup(
    name="store",
    help="Look into a weight store, check it, roll it back, and move versions to and from disk.",
    epilog="A store is found by the URL of its register: as an argument, by --register or HOLDFAST_REGISTER; "
    "or by --job NAME for a job that runs here.",
    no_args_is_help=True,
)


class Format(StrEnum):
    """How a version lies on disk."""

    safetensors = "safetensors"
    dcp = "dcp"


Register = Annotated[
    str,
    typer.Option(
        "--register",
        "-r",
        envvar="HOLDFAST_REGISTER",
        help="The store's register: sqlite:///path, ... Or give the URL as an argument.",
    ),
]
Job = Annotated[str, typer.Option(help="Instead: a job that runs here, or a folder with its files.")]
Name = Annotated[str, typer.Option(help="The store's name, if the register has several.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="The limit, in seconds, for each read of a holder.")]


@app.command()
def ls(
    register: Register = "", job: Job = "", name: Name = "default", json: Json = False, timeout: Timeout = 5.0
) -> None:
    """List the versions of a store, with their replicas and leases, and the memory of each holder.

    Changes nothing, and does not become a holder. A holder is shown as
    dead when its process has ended, although the catalogue still lists
    it; replicas that have still to be made count as lacking.

    [bold]Examples[/bold]

        holdfast store ls sqlite:///run/job.sqlite

        holdfast store ls --job job           # a job that runs here, by name

        holdfast store ls --json | jq '.versions | map(select(.lacking > 0)) | map(.number)'

    Exit status: 0; 2 if there is no store, or its register cannot be reached.
    """
    from holdfast.store.inspection import inspector

    url = _url(register, job)
    with _errors("ls"), inspector(url, name, timeout=timeout) as store:
        report = store.report()
    if json:
        _print_json(report)
        return
    from holdfast.ft.console.console import console
    from holdfast.harness.cli.store_tables import holders_table, versions_table

    out = console()
    out.print(versions_table(report))
    out.print(holders_table(report))


@app.command()
def inspect(
    version: Annotated[str, typer.Argument(help="A version's number, or latest.")] = "latest",
    register: Register = "",
    job: Job = "",
    name: Name = "default",
    json: Json = False,
    timeout: Timeout = 5.0,
) -> None:
    """Show what a version holds: its tensors and other values, its parts with their digests, and their holders.

    [bold]Examples[/bold]

        holdfast store inspect latest sqlite:///run/job.sqlite

        holdfast store inspect 7 --json | jq '.tensors | map(.nbytes) | add'

    Exit status: 0; 2 if there is no such version, or none of its holders
    can be read.
    """
    from holdfast.harness.cli.store_tables import shortened
    from holdfast.store.inspection import inspector

    wanted, url = _version(version), _url(register, job)
    with _errors("inspect"), inspector(url, name, timeout=timeout) as store:
        content = store.content(wanted)
    values = {name: shortened(value) for name, value in content.values().items()}
    if json:
        parts = {"version": content.version, "parts": content.parts, "tensors": content.tensors}
        _print_json({**parts, "tied": content.skeleton.ties, "values": values})
        return
    from holdfast.ft.console.console import console
    from holdfast.harness.cli.store_tables import parts_table, tensors_table, values_table

    out = console()
    out.print(parts_table(content))
    out.print(tensors_table(content))
    if values:
        out.print(values_table(values))


@app.command()
def verify(
    version: Annotated[str, typer.Argument(help="A version's number, latest, or all.")] = "all",
    register: Register = "",
    job: Job = "",
    name: Name = "default",
    json: Json = False,
    timeout: Timeout = 30.0,
) -> None:
    """Read every replica of every part, and compare all bytes with their checksums.

    Changes nothing: a wrong replica stays in the catalogue until a reader
    of the store meets it, which removes it and lets another holder make
    a new one.

    [bold]Examples[/bold]

        holdfast store verify sqlite:///run/job.sqlite

        holdfast store verify latest --json | jq '.[] | select(.result != "right")'

    Exit status: 0 if every replica has the right bytes; 1 if one has wrong
    bytes or cannot be read; 2 if there is no such version or no store; 3
    if the store is empty, so that nothing was read.
    """
    from holdfast.ft.console.console import console, working
    from holdfast.ft.console.units import counted
    from holdfast.store.inspection import inspector

    wanted, url = version if version == "all" else _version(version), _url(register, job)
    checks = []
    with _errors("verify"), inspector(url, name, timeout=timeout) as store:
        total = counted(len(store.replicas(wanted)), "replica")
        with working(console(stderr=True), f"reading {total}", every=2.0) as say:
            for check in store.verify(wanted):
                checks.append(check)
                say(f"read {len(checks)} of {total}")
    if json:
        _print_json(checks)
    elif not checks:
        typer.echo("holdfast store verify: nothing was read: no version is visible", err=True)
    else:
        from holdfast.harness.cli.store_tables import checks_table

        console().print(checks_table(checks))
    if not checks:
        raise typer.Exit(NOTHING_TO_VERIFY)
    if not all(check.right for check in checks):
        raise typer.Exit(1)


@app.command()
def rollback(
    version: Annotated[int, typer.Argument(min=0, help="The version that readers of latest get from now on.")],
    register: Register = "",
    job: Job = "",
    name: Name = "default",
) -> None:
    """Make an older version the latest. Newer ones can still be read by number until they are superseded.

    [bold]Examples[/bold]

        holdfast store rollback 6 --register sqlite:///run/job.sqlite

    Exit status: 0; 2 if there is no such version: nothing is changed then.
    """
    from holdfast.store import WeightStore

    url = _url(register, job)
    with _errors("rollback"), WeightStore(url, name=name, hold=False) as store:
        before = store.latest()
        store.rollback(version)
    typer.echo(f"latest is {version}; it was {before}")


@app.command()
def export(
    version: Annotated[str, typer.Argument(help="A version's number, or latest.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    format: Annotated[  # noqa: A002
        Format,
        typer.Option("--format", help="As transformers loads it, or as torch.distributed.checkpoint does."),
    ] = Format.safetensors,
    shard_size: Annotated[str, typer.Option(help="The largest file of safetensors: 512M, 4G.")] = "1G",
    register: Register = "",
    job: Job = "",
    name: Name = "default",
    timeout: Timeout = 30.0,
) -> None:
    """Write a version to a new directory, which appears once all of it is on the disk.

    transformers loads safetensors from it when the model's config.json
    lies there too; torch.distributed.checkpoint loads the format dcp. The
    version is pinned meanwhile, and is read in batches: little memory is
    needed.

    [bold]Examples[/bold]

        holdfast store export latest model/ --register sqlite:///run/job.sqlite

        holdfast store export 7 checkpoint/ --format dcp

    Exit status: 0; 2 if there is no such version, DIR exists already, or
    the disk is full: no part of DIR is left then.
    """
    from holdfast.ft.console.units import format_bytes
    from holdfast.harness.bench.operations import parse_size
    from holdfast.store import WeightStore
    from holdfast.store.interop import dcp, safetensors

    wanted, url = _version(version), _url(register, job)
    with _errors("export"):
        limit = parse_size(shard_size)
        with WeightStore(url, name=name, hold=False) as store, byte_progress(f"writing {directory}") as progress:
            if format is Format.dcp:
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as is meant here
                number = dcp.export_version(store, wanted, directory, timeout=timeout, progress=progress)
            else:
                number = safetensors.export_version(
                    store, wanted, directory, shard_bytes=limit, timeout=timeout, progress=progress
                )
    written = sum(path.stat().st_size for path in directory.iterdir())
    typer.echo(f"version {number} is in {directory}: {format_bytes(written)}")


@app.command("import")
def import_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of safetensors, or of dcp.")],
    version: Annotated[
        int | None, typer.Option(min=0, show_default="that of the export", help="The number that it gets.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Hold the version until this command is ended.")] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, show_default="2, with --serve 1", help="How many processes must hold it.")
    ] = None,
    register: Register = "",
    job: Job = "",
    name: Name = "default",
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait until the replicas exist.")] = 30.0,
) -> None:
    """Publish what a directory has as a version: an export, a model of transformers, or a checkpoint of torch.

    A store lies in the memory of the processes that have it open: other
    holders take the version from this process, or it stays and serves
    with --serve until Ctrl-C or SIGTERM.

    [bold]Examples[/bold]

        holdfast store import model/ --register sqlite:///run/job.sqlite

        holdfast store import Qwen3-0.6B/ --version 1 --serve --register "sqlite://$PWD/weights.sqlite"

    Checksums of an exported version are compared first. No code of DIR
    runs: values that would need it are refused.

    Exit status: 0; 2 if DIR is damaged, the version exists with other
    bytes, or too few processes hold it after the timeout: nothing is
    published then.
    """
    from holdfast.store import WeightStore
    from holdfast.store.interop import import_version

    url = _url(register, job, may_be_new=serve)
    asked = replicas if replicas is not None else 1 if serve else None
    with (
        _errors("import"),
        WeightStore(url, name=name, hold=serve, replicas=asked) as store,
    ):
        with byte_progress(f"reading {directory}") as progress:
            number = import_version(store, directory, version, timeout=timeout, progress=progress)
        pids = ", ".join(str(holder.pid) for holder in store.holders(number))
        typer.echo(f"version {number} is in the store, held by pid {pids}")
        if serve:
            typer.echo("serving until Ctrl-C")
            with suppress(KeyboardInterrupt):
                threading.Event().wait()


def _errors(command: str) -> AbstractContextManager[None]:
    """Errors of the store, of its register and of files are one line."""
    return in_one_line(f"holdfast store {command}", ValueError, OSError)


def _url(register: str, job: str, *, may_be_new: bool = False) -> str:
    """The URL of a register, which must exist unless it `may_be_new`: a look at a store makes no file."""
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.diagnosis.jobs import locate
    from holdfast.ft.registers.sqlite import path_of

    if job:
        try:
            register = locate(job).register
        except HoldfastError as error:
            raise typer.BadParameter(str(error), param_hint="--job") from error
    if not register:
        raise typer.BadParameter(
            "name the store by its register's URL: sqlite:///path as an argument, HOLDFAST_REGISTER, or --job NAME",
            param_hint="--register",
        )
    if register.startswith("memory://"):
        raise typer.BadParameter(
            f"{register} is a store inside one process, which no other can see", param_hint="--register"
        )
    if register.startswith("sqlite:"):
        try:
            path = path_of(register)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--register") from error
        if not may_be_new and not path.exists():
            raise typer.BadParameter(f"there is no register {path}", param_hint="--register")
    return register


def _version(text: str) -> int | Literal["latest"]:
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit() and int(text) < 1 << 63:
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a version's number nor latest", param_hint="VERSION")


def _print_json(thing: Any) -> None:
    from holdfast.ft.console.console import print_json

    print_json(thing)


PATIENCE = 2.0
"""Seconds between two lines of progress where there is no terminal."""


@contextmanager
def byte_progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the bytes done and to do."""
    from holdfast.ft.console.console import console, working
    from holdfast.ft.console.units import format_bytes

    with working(console(stderr=True), doing, every=PATIENCE) as say:
        yield lambda done, total: say(f"{doing}: {format_bytes(done)} of {format_bytes(total)}")
