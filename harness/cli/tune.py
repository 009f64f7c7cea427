"""`holdfast tune`: measures the links of this machine, and shows the algorithm chosen for each size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.ft.console.units import format_bytes
from holdfast.harness.command_line import in_one_line, names_in

if TYPE_CHECKING:
    from holdfast.harness.bench.tune import AlgorithmChoice

SHOWN_RANKS = (2, 3, 4, 8, 64)
SHOWN_SIZES = tuple(8 << step for step in range(28))


def tune(
    backend: Annotated[
        str, typer.Option(help="Backends to measure, separated by commas. Default: all that can run here.")
    ] = "",
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing: print the constants and choices in use.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove what was measured, and go back to the defaults.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure latency and bandwidth between two ranks, from which collective algorithms are chosen.

    [bold]Examples[/bold]

        holdfast tune

        holdfast tune --backend ucx,mpi

        holdfast tune --show

    Do it once a machine, when it is quiet: it takes a few seconds a
    backend. The two constants are kept in your cache folder; without
    them documented defaults hold. All ranks of a job use those of rank 0.
    What a backend runs over is what counts: to measure ucx over TCP, run
    it as the job would be run, UCX_TLS=tcp,self holdfast tune --backend ucx.

    Backends that have collectives of their own (shm, gloo) have nothing
    to choose, and say so.
    """
    from holdfast.comms.algorithms.message_passing import tuning
    from holdfast.harness.bench import tune as tuner

    if show and (forget or backend):
        raise typer.BadParameter("--show measures and removes nothing; give it alone, or with --json")
    if forget:
        typer.echo(f"{'removed' if tuning.forget() else 'there was no'} {tuning.path()}")
        return
    try:
        names = names_in("--backend", backend, "ucx,mpi") if backend else ()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with in_one_line("holdfast tune", status=1):
        if not show:
            found = tuner.tune(names or tuner.tunable())
            for name in names:
                if not any(link.split("/")[0] == name for link in found):
                    typer.echo(f"{name} has nothing to choose: its collectives are its own", err=True)
        _print(tuner.links(), json)


def _print(links: dict[str, Any], json: bool) -> None:
    from holdfast.comms.algorithms.message_passing import tuning
    from holdfast.ft.console.console import console, print_json, styled
    from holdfast.harness.bench import tune as tuner

    if json:
        described = {
            name: {
                "latency": link.latency,
                "bandwidth": link.bandwidth,
                "measured": measured.measured if measured else None,
                "worst_error": measured.worst_error if measured else None,
                "choices": tuner.choices(link, SHOWN_RANKS, SHOWN_SIZES),
            }
            for name, (link, measured) in links.items()
        }
        print_json({"file": str(tuning.path()), "links": described})
        return
    out = console()
    out.print(f"kept in {tuning.path()}")
    for name, (link, measured) in links.items():
        origin = f"measured {measured.measured}, fits to {measured.worst_error:.0%}" if measured else "default"
        out.print()
        out.print(styled(name, "bold") + f": {link.latency * 1e6:.1f} us, {link.bandwidth / 1e9:.2f} GB/s ({origin})")
        chosen = tuner.choices(link, SHOWN_RANKS, SHOWN_SIZES)
        for start in range(0, len(chosen), len(SHOWN_SIZES)):
            row = chosen[start : start + len(SHOWN_SIZES)]
            out.print(f"  {row[0].op:<11}{row[0].ranks:>3} ranks: {_in_words(row)}")


def _in_words(row: Sequence[AlgorithmChoice]) -> str:
    """The algorithms by growing size, each with the size from which on it is chosen."""
    words = [row[0].algorithm]
    for before, each in itertools.pairwise(row):
        if each.algorithm != before.algorithm:
            words.append(f"{each.algorithm} from {format_bytes(each.nbytes)}")
    return ", ".join(words)
