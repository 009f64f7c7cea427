"""`holdfast gate`: the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from holdfast.harness.gate.sides import Side


def gate(
    base: Annotated[str, typer.Argument(help="A commit, or a folder: what to compare with.")] = "HEAD",
    head: Annotated[str, typer.Argument(help="A commit, or a folder such as . for the files as they are.")] = ".",
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this workload; may be repeated.")] = None,
    most: Annotated[int, typer.Option(min=6, help="Pairs of processes after which it gives up on a workload.")] = 40,
    effect: Annotated[float, typer.Option(min=0.02, max=1.0, help="The slowdown not to be overlooked.")] = 0.05,
    repository: Annotated[Path, typer.Option(help="Where the commits are.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell a commit that is slower from noise: exit status 1 if HEAD is.

    [bold]Examples[/bold]

        holdfast gate main HEAD --json

        holdfast gate                   # what is not committed yet, against the last commit

    Both sides run here, interleaved, in fresh pairs of processes on one
    CPU, until each workload is decided. What counts is CPU time, paired
    slice by slice, so that a busy machine costs time rather than truth.

    Exit status: 1 if a workload is slower, 2 if a side cannot be had, HEAD
    fails in a workload that BASE runs, or nothing could be compared, 3 if
    a workload was not decided and may be slower by the effect.
    """
    from holdfast.ft.console.console import console, print_json, working
    from holdfast.harness.gate.gate import DecisionRule, run, show
    from holdfast.harness.gate.pairs import SideFailed

    rule = DecisionRule(effect=effect, most=most)
    notes, out = console(stderr=True), console()
    try:
        with (
            working(notes, "building both sides; then a few minutes of pairs") as progress,
            _built(base, head, repository) as sides,
        ):
            report = run(sides, rule, only or (), progress)
    except (ValueError, SideFailed) as error:
        notes.print(f"holdfast gate: {error}")
        raise typer.Exit(2) from error
    if json:
        print_json(report)
    else:
        show(report, out)
    raise typer.Exit(report.status)


@contextlib.contextmanager
def _built(base: str, head: str, repository: Path) -> Iterator[tuple[Side, Side]]:
    """Build both sides in a folder; remove it at the end of the block."""
    from holdfast.ft.launch.held_directory import HeldDirectory
    from holdfast.harness.gate.sides import build

    with HeldDirectory("holdfast-gate-") as folder:
        yield build(base, repository, folder.path / "base"), build(head, repository, folder.path / "head")
