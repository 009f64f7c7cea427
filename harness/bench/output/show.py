"""Shows a bench: tables in the terminal, and a plot of bus bandwidth and time over size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.ft.console.console import styled
from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.definitions import OPERATIONS
from holdfast.harness.bench.collectives.ranks import HOLDFAST
from holdfast.harness.bench.output.results import Bench, BenchRow, OpRatio
from holdfast.harness.measure.show import figures, others, show_head, show_time

if TYPE_CHECKING:
    from holdfast.harness.bench.recovery import RecoveryBench


def _short(contestant: str) -> str:
    return contestant.removeprefix(HOLDFAST)


def _wrong(count: int | None) -> Text:
    if count is None:
        return Text("?")
    return styled(count, "bold red" if count else "")


def _table(
    op: str, ranks: int, rows: list[BenchRow], ratios: dict[tuple[int, str, str], OpRatio], fresh: bool
) -> Table:
    ours = list(dict.fromkeys(name for _, name, _ in ratios))
    operation = OPERATIONS[op]
    all_right = () if any(row.wrong for row in rows) else ("#wrong",)
    speed_ups = [f"{_short(name)} speed-up" for name in ours]
    table = figures(
        f"{op}, {counted(ranks, 'rank')}" + (", inputs written anew before each op" if fresh else ""),
        ("size", "library", "p50", "p99", "min", "algbw GB/s", "busbw GB/s", "#wrong", *speed_ups),
        names=("library",),
        caption=f"size: {operation.size}; busbw = algbw x {operation.factor}"
        + ("; speed-up: how many times as fast, median over the rounds" if ours else ""),
        drop=("min", "p99", "algbw GB/s", *all_right, "busbw GB/s", *reversed(speed_ups)),
    )
    before = None
    for row in sorted(rows, key=lambda row: row.nbytes):
        if before not in (None, row.nbytes):
            table.add_section()
        against = [ratios.get((row.nbytes, name, row.contestant)) for name in ours]
        table.add_row(
            "" if row.nbytes == before else format_bytes(row.nbytes),
            _short(row.contestant),
            show_time(row.timing.p50),
            show_time(row.timing.p99),
            show_time(row.timing.min),
            f"{row.algbw:.3g}" if row.nbytes else "",
            f"{row.busbw:.3g}" if row.nbytes else "",
            _wrong(row.wrong),
            *("" if ratio is None else f"{ratio.median:.3g}x" for ratio in against),
        )
        before = row.nbytes
    return table


def show(bench: Bench, out: Console) -> None:
    """Print the whole bench."""
    show_head(bench, out)
    for what, reason in bench.left_out().items():
        out.print(styled(f"  {what}", "yellow") + f": {reason}")
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows):
        chosen = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks)]
        ratios = {(r.nbytes, r.ours, r.peer): r for r in bench.ratios if (r.op, r.ranks) == (op, ranks)}
        out.print()
        out.print(_table(op, ranks, chosen, ratios, bench.fresh))
    for failure in bench.failures:
        out.print(
            styled("failed", "bold red") + f": {failure.contestant}, {failure.op}, {counted(failure.ranks, 'rank')}, "
            f"{format_bytes(failure.nbytes)}: {failure.reason}"
        )


def show_recovery(bench: RecoveryBench, out: Console) -> None:
    """Print the spread of the whole recovery and of its parts."""
    spares = f", {counted(bench.spares, 'spare')}" if bench.spares else ", no spares"
    where = "" if bench.device == "cpu" else f" on {bench.device}"
    signal, kills = ("SIGSTOP", "times") if bench.stopped else ("SIGKILL", "kills")
    proposer = " and then of the proposer" if bench.proposer else ""
    table = figures(
        f"{signal} of {bench.together} of {bench.ranks} ranks{proposer} in all_reduce, {bench.backend}{where}{spares}, "
        f"{len(bench.kills)} {kills}",
        ("", "median", "p90", "p99", "max"),
        names=("",),
        caption=f"until the last survivor's next correct all_reduce; {others(bench.others)}",
    )
    for name, spread in (
        ("whole recovery", bench.total),
        ("the process is gone, as the killer sees it", bench.gone),
        ("detect", bench.detect),
        ("agree on the next epoch", bench.agree),
        ("rebuild the communicator", bench.rebuild),
        ("first all_reduce", bench.first_op),
    ):
        values = (spread.median, spread.p90, spread.p99, spread.max)
        table.add_row(name, *(f"{value:.2f} ms" for value in values), style="bold" if name.startswith("whole") else "")
    out.print(table)
