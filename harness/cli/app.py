"""The `holdfast` command. A command imports what is heavy only when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from holdfast.ft.console.command_line import CommandGroup, signals_end_in_order
from holdfast.ft.console.visible import replace_unencodable
from holdfast.harness.bench.command import app as bench_app
from holdfast.harness.blame.command import blame
from holdfast.harness.chaos.command import app as chaos_app
from holdfast.harness.cli.new_plugin import new_plugin
from holdfast.harness.cli.tune import tune
from holdfast.harness.conformance.command import conformance
from holdfast.harness.demo.command import demo
from holdfast.harness.gate.command import gate
from holdfast.harness.simulate.command import simulate
from holdfast.harness.top.command import top

app = CommandGroup(
    name="holdfast",
    help="Communications that hold when ranks die.",
    epilog="Start with: holdfast backends, then holdfast demo. Each command has examples: holdfast COMMAND --help.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(chaos_app, name="chaos")
app.command()(blame)
app.command()(demo)
app.command()(conformance)
app.command()(gate)
app.command()(new_plugin)
app.command()(simulate)
app.command()(top)
app.command()(tune)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def backends(
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the backends, failure detectors and registers: which can run here, what to install, what each can do.

    [bold]Examples[/bold]

        holdfast backends

        holdfast backends --json | jq '.backends | map_values(.available)'

    A plugin that does not load is listed as broken, with the reason, and harms no other.
    """
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.cli.backends import describe, detectors_table, registers_table, table

    described = describe()
    if json:
        print_json(described)
        return
    out = console()
    for each in (table(described), detectors_table(described), registers_table(described)):
        out.print(each)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(help="The Python script to run; it joins by holdfast.ft.Session.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    size: Annotated[int, typer.Option("-n", "--size", min=1, help="How many ranks the job has.")] = 2,
    spares: Annotated[int, typer.Option(min=0, help="Further processes that wait for a rank to die.")] = 0,
    backend: Annotated[str, typer.Option(help="A backend, or several in order of preference: ucx,gloo.")] = "shm",
    job: Annotated[str, typer.Option(help="The name of the job.")] = "job",
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, show_default="no limit", help="Seconds that processes may go on after the job's last step."
        ),
    ] = float("inf"),
    min_size: Annotated[
        int | None, typer.Option(min=1, help="How few ranks the job can go on with, if the script does not say it.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, help="Into how many parts a step is divided, if the script does not say it.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check that all ranks call the same ops with the same arguments (slower).")
    ] = False,
    logs: Annotated[Path | None, typer.Option(help="Keep event logs and flight recordings in this folder.")] = None,
) -> None:
    """Run a script as one job: size + spares processes on this machine, each of which joins by ft.Session().

    [bold]Examples[/bold]

        holdfast run -n 4 train.py --lr 0.1

        holdfast run -n 4 --spares 1 --backend ucx --logs events train.py

        holdfast run -n 4 --backend mpi train.py

    The script needs no rank and no size: holdfast.ft.Session() finds
    the job by the environment that this command sets: HOLDFAST_JOB,
    HOLDFAST_REGISTER, HOLDFAST_KEY_FILE, HOLDFAST_BACKEND, HOLDFAST_SIZE,
    and HOLDFAST_MIN_SIZE and HOLDFAST_SHARDS if they are given here.

    When a process dies the sessions put a spare in its place or go on
    without it; nothing is restarted. All processes end with this command,
    and with each process all that it has started. The job ends as soon as
    fewer processes are left than it needs.
    Output is shown with the number of the process in front.

    After the last step the members of the job go on as long as they
    like, or for --grace seconds; one that is stopped, or a spare, is ended
    5 s after the last of them.

    Exit status: 0 only if the job finished and its last members exited
    with 0 as well. If not, a table at the end says which ranks failed, and
    how.
    """
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.launch.local_launcher import LaunchPlan, launch, python_command

    if not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    try:
        command = python_command(script, arguments or ())
        status = launch(LaunchPlan(command, size, spares, backend, job, grace, min_size, shards, check), logs)
    except (HoldfastError, ValueError, OSError) as error:
        typer.echo(f"holdfast run: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        replace_unencodable(stream)
    with signals_end_in_order():
        app(prog_name="holdfast")


if __name__ == "__main__":
    main()
