"""`holdfast conformance`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


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
    from holdfast.comms.errors import HoldfastError
    from holdfast.ft.console.console import print_json
    from holdfast.harness.conformance.run import run

    try:
        passed, outcomes = run(backend, ranks, select, quiet=json)
    except HoldfastError as error:
        typer.echo(f"holdfast conformance: {error}", err=True)
        raise typer.Exit(2) from error
    if not outcomes:
        typer.echo(
            f"holdfast conformance: no check could run on {backend}" + f" with -k {select!r}" * bool(select), err=True
        )
        raise typer.Exit(2)
    if json:
        document = {"backend": backend, "ranks": ranks, "passed": passed, "checks": [asdict(o) for o in outcomes]}
        print_json(document)
    raise typer.Exit(0 if passed else 1)
