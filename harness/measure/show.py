"""What benches print on a terminal: tables of figures, the machine, times."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_seconds
from holdfast.harness.measure.results import Machine, Run

QUIET = 0.1
"""CPUs that other processes may use before the figures are in doubt."""


def show_time(microseconds: float) -> str:
    """Microseconds to three figures, with a unit."""
    return format_seconds(1e-6 * microseconds)


def figures(
    title: str, columns: Sequence[str], *, names: Sequence[str] = (), caption: str = "", drop: Sequence[str] = ()
) -> FoldingTable:
    """An empty table of figures: right-justified but for the columns of `names`; those of `drop` go first."""
    table = FoldingTable(title=title, title_justify="left", caption=caption, caption_justify="left", drop=drop)
    for column in columns:
        table.add_column(column, justify="left" if column in names else "right")
    return table


def describe(machine: Machine, more: str = "") -> str:
    """The machine of a run in words."""
    return (
        f"{machine.processor}, {counted(machine.cpus, 'CPU')}, Linux {machine.kernel}, Python {machine.python}, "
        f"torch {machine.torch}{more}; {others(machine.others)}"
    )


def others(cpus: float) -> str:
    """How many CPUs other processes used, in words."""
    return f"other processes used {cpus:.2f} CPUs meanwhile"


def show_head(run: Run, out: Console, more: str = "") -> None:
    """Print the machine of a run, yellow if it was busy with something else, the contestants, and those left out."""
    out.print(styled(describe(run.machine, more), "yellow" if run.machine.others > QUIET else ""))
    for name, detail in run.contestants.items():
        out.print(f"  {name}: {detail}")
    for name, reason in run.skipped.items():
        out.print(styled(f"  {name} left out", "yellow") + f": {reason}")
