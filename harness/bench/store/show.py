"""Shows a run: tables in the terminal and as Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.results import FIRST_TURNS, StoreBench, StoreRatio, StoreRow
from holdfast.harness.measure.show import describe, figures, show_machine, show_time
from holdfast.harness.report.plot import SERIES, Chart, light

CAPTION = (
    f"p50, min and p99 of the turns after the first {FIRST_TURNS} of each start, which stand by themselves; "
    "speed-up: how many times as fast holdfast is, median, least and most over the rounds"
)

EARLY = ("first", "second", "third")


def _ratio(bench: StoreBench, row: StoreRow) -> StoreRatio | None:
    wanted = (row.workload, row.figure, row.contestant)
    return next((each for each in bench.ratios if (each.workload, each.figure, each.peer) == wanted), None)


def _speed_up(ratio: StoreRatio | None) -> str:
    return "" if ratio is None else f"{ratio.median:.3g}x ({ratio.least:.3g} to {ratio.most:.3g})"


def _times(row: StoreRow) -> list[str]:
    times = (row.timing.p50, row.timing.min, row.timing.p99, *row.early)
    return ["" if each is None else show_time(each) for each in times]


def _heading(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> str:
    state = f"{counted(rows[0].tensors, 'tensor')}, {format_bytes(rows[0].nbytes)}"
    return f"{workload}: {bench.workloads[workload]}; {state}"


def _threads(bench: StoreBench) -> str:
    return f", {counted(bench.threads, 'thread')}"


def show(bench: StoreBench, out: Console) -> None:
    """Print the whole run."""
    out.print(show_machine(bench.machine, _threads(bench)))
    for name, detail in bench.contestants.items():
        out.print(f"  {name}: {detail}")
    for name, reason in bench.skipped.items():
        out.print(styled(f"  {name} left out", "yellow") + f": {reason}")
    for workload in bench.workloads:
        rows = [row for row in bench.rows if row.workload == workload]
        if rows:
            out.print()
            out.print(_table(bench, workload, rows))
    if bench.goals:
        out.print()
        out.print(_goals(bench))
    for failure in bench.failures:
        out.print(styled("failed", "bold red") + f": {failure.contestant}, {failure.workload}: {failure.reason}")


def _table(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> FoldingTable:
    all_right = () if any(row.wrong for row in rows) else ("#wrong",)
    table = figures(
        _heading(bench, workload, rows),
        ("figure", "library", "p50", "min", "p99", *EARLY, "GB/s", "#wrong", "speed-up"),
        names=("figure", "library"),
        caption=CAPTION,
        drop=("min", "p99", *all_right, "third", "GB/s", "second", "first"),
    )
    before = None
    for row in rows:
        if before not in (None, row.figure):
            table.add_section()
        wrong = styled(row.wrong, "bold red" if row.wrong else "")
        table.add_row(
            "" if row.figure == before else row.figure,
            row.contestant,
            *_times(row),
            f"{row.rate:.3g}",
            wrong,
            _speed_up(_ratio(bench, row)),
            style="bold" if row.contestant == HOLDFAST else "",
        )
        before = row.figure
    return table


def _goals(bench: StoreBench) -> FoldingTable:
    columns = ("workload", "figure", "to reach", "reached", "")
    table = figures("to reach", columns, names=("workload", "figure", "to reach", ""))
    for goal in bench.goals:
        reached = Text("yes", "green") if goal.met else Text("no", "bold red")
        table.add_row(goal.workload, goal.figure, goal.goal, goal.reached, reached)
    return table


def markdown(bench: StoreBench) -> str:
    """The run as Markdown, for the documentation."""
    lines = [f"`{bench.command}`", "", f"{describe(bench.machine, _threads(bench))}.", ""]
    lines += [f"- {name}: {detail}" for name, detail in bench.contestants.items()]
    lines += [f"- {name} was left out: {reason}" for name, reason in bench.skipped.items()]
    if bench.goals:
        lines += ["", "| workload | figure | to reach | reached | |", "|---|---|---|---|---|"]
        lines += [
            f"| {goal.workload} | {goal.figure} | {goal.goal} | {goal.reached} | {'yes' if goal.met else '**no**'} |"
            for goal in bench.goals
        ]
    for workload in bench.workloads:
        rows = [row for row in bench.rows if row.workload == workload]
        if not rows:
            continue
        lines += ["", f"**{_heading(bench, workload, rows)}**", ""]
        columns = ("figure", "library", "p50", "min", "p99", *EARLY, "GB/s", "speed-up")
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in rows:
            ratio = _speed_up(_ratio(bench, row))
            lines.append(f"| {row.figure} | {row.contestant} | {' | '.join(_times(row))} | {row.rate:.3g} | {ratio} |")
    wrong = f"{counted(bench.wrong, 'tensor')} came out wrong."
    return "\n".join([*lines, "", f"{CAPTION}. {wrong}"])


def plot(bench: StoreBench, path: Path) -> None:
    """Write a picture: the median time of each figure and contestant, with whiskers from min to p99.

    Raises ValueError if there is nothing to plot.
    """
    workloads = [name for name in bench.workloads if any(row.workload == name for row in bench.rows)]
    if not workloads:
        raise ValueError("there is nothing to plot: nothing was measured")
    names = list(dict.fromkeys(row.contestant for row in bench.rows))
    heights = [64 + 22.0 * sum(row.workload == name for row in bench.rows) for name in workloads]
    chart = Chart(1000, sum(heights), heights)
    for name, axes in zip(workloads, chart.all_axes, strict=True):
        rows = [row for row in bench.rows if row.workload == name]
        axes.set_title(_heading(bench, name, rows), loc="left", fontsize=12)
        for place, row in enumerate(rows):
            low, mid, high = (value / 1e3 for value in (row.timing.min, row.timing.p50, row.timing.p99))
            mark = "D" if row.contestant == HOLDFAST else "o"
            paint = light(f"s{names.index(row.contestant) % SERIES}")
            axes.errorbar(mid, place, xerr=[[mid - low], [high - mid]], fmt=mark, color=paint, capsize=3)
            axes.annotate(f"  {show_time(row.timing.p50)}", (high, place), va="center", size=11)
        axes.set_yticks(range(len(rows)), [f"{row.figure}, {row.contestant}" for row in rows], color=light("ink"))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: show_time(1e3 * value))
        axes.minorticks_off()
        axes.grid(axis="x")
        axes.margins(x=0.15, y=0.15)
    chart.save(path)
