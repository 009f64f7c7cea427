"""The `holdfast` command. A command imports what is heavy only when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from holdfast.ft.console.output import replace_unencodable
from holdfast.harness.bench.command import app as bench_app
from holdfast.harness.chaos.command import app as chaos_app
from holdfast.harness.cli.blame import blame
from holdfast.harness.cli.demo import demo
from holdfast.harness.cli.new_plugin import new_plugin
from holdfast.harness.cli.rl import app as rl_app
from holdfast.harness.cli.run import run
from holdfast.harness.cli.store import app as store_app
from holdfast.harness.cli.top import top
from holdfast.harness.cli.tune import tune
from holdfast.harness.command_line import CommandGroup, signals_end_in_order
from holdfast.harness.gate.command import gate
from holdfast.harness.simulate.command import simulate


def conformance(
    backend: Annotated[str, typer.Option("--backend", help="The name of the backend to check.")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks the collectives run on.")] = 2,
    select: Annotated[str, typer.Option("-k", help="Only checks whose names match (a pytest expression).")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the outcome of every check as JSON.")] = False,
) -> None:
    """Run the checks that make a backend a backend, ours or a plugin's, on this machine.

    [bold]Examples[/bold]

        holdfast conformance --backend shm

        holdfast conformance --backend mybackend -n 4 -k 'all_reduce or killed'

    Collectives by dtype, shape and size; asynchronous ops; abort, kill,
    stop and close; disagreement between ranks; leaks over many rebuilds.
    Windows, atomics and memory planes for backends that say they have them.
    Needs pytest: pip install 'holdfast[conformance]'.

    Exit status: 0 only if every check passed that applies; 2 if none could run.
    """
    from dataclasses import asdict

    from holdfast.ft.console.console import print_json
    from holdfast.harness.conformance.run import run as run_checks

    passed, outcomes = run_checks(backend, ranks, select, quiet=json)
    if not outcomes:
        typer.echo(
            f"holdfast conformance: no check could run on {backend}" + f" with -k {select!r}" * bool(select), err=True
        )
        raise typer.Exit(2)
    if json:
        document = {"backend": backend, "ranks": ranks, "passed": passed, "checks": [asdict(o) for o in outcomes]}
        print_json(document)
    raise typer.Exit(0 if passed else 1)


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
app.add_typer(rl_app, name="rl")
app.add_typer(store_app, name="store")
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
    hints: Annotated[bool, typer.Option("--hints", help="List the settings that backends take as hints.")] = False,
) -> None:
    """List the backends, failure detectors and registers: which can run here, what to install, what each can do.

    [bold]Examples[/bold]

        holdfast backends

        holdfast backends --hints

        holdfast backends --json | jq '.backends | map_values(.available)'

    A plugin that does not load is listed as broken, with the reason, and harms no other.
    """
    from holdfast.ft.console.console import console, print_json
    from holdfast.harness.cli.backends import describe, detectors_table, hints_table, registers_table, table

    described = describe()
    if json:
        print_json(described)
        return
    out = console()
    if hints:
        out.print(hints_table(described))
        return
    for each in (table(described), detectors_table(described), registers_table(described)):
        out.print(each)


app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run)


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        replace_unencodable(stream)
    with signals_end_in_order():
        app(prog_name="holdfast")


if __name__ == "__main__":
    main()
