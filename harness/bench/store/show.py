"""Shows a run: tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from holdfast.ft.console.console import FoldingTable, styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.results import FIRST_TURNS, StoreBench, StoreRatio, StoreRow
from holdfast.harness.measure.show import figures, show_head, show_time

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


def heading(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> str:
    """The title of a workload's table: what it is, and its state."""
    state = f"{counted(rows[0].tensors, 'tensor')}, {format_bytes(rows[0].nbytes)}"
    return f"{workload}: {bench.workloads[workload]}; {state}"


def threads_of(bench: StoreBench) -> str:
    """How many threads torch had in each process, to be put behind the machine."""
    return f", {counted(bench.threads, 'thread')}"


def show(bench: StoreBench, out: Console) -> None:
    """Print the whole run."""
    show_head(bench, out, threads_of(bench))
    for workload in bench.workloads:
        rows = [row for row in bench.rows if row.workload == workload]
        if rows:
            out.print()
            out.print(table_of(bench, workload, rows))
    for failure in bench.failures:
        out.print(styled("failed", "bold red") + f": {failure.contestant}, {failure.workload}: {failure.reason}")


def table_of(bench: StoreBench, workload: str, rows: Sequence[StoreRow]) -> FoldingTable:
    """The table of a workload."""
    all_right = () if any(row.wrong for row in rows) else ("#wrong",)
    table = figures(
        heading(bench, workload, rows),
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
