"""Draws the pictures of docs/benchmarks/index.md from data: `python docs/figures/draw.py FOLDER`.

`make figures-data` measures that data anew; `make figures` draws. A picture without data is reported as missing.
Pictures of simulations are drawn by `python docs/experiments/growth.py`, in a folder of their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.ft.console.console import FoldingTable
from holdfast.ft.console.units import counted
from holdfast.harness.bench import report
from holdfast.harness.bench.recovery import RecoveryBench
from holdfast.harness.bench.report import Bench
from holdfast.harness.bench.store.drivers import HOLDFAST
from holdfast.harness.bench.store.run import CAPTION, StoreBench, heading, table_of, threads_of
from holdfast.harness.measure.results import describe, show_time
from holdfast.harness.measure.stats import Spread
from holdfast.harness.report.charts import WIDTH
from holdfast.harness.report.plot import FONT, SERIES, Chart, light

TIMELINE = "A timeline of every process of the run, with the faults"
"""The text alternative of the timeline in a chaos report."""


class PeerRecovery(msgspec.Struct, frozen=True):
    """The recoveries of another library."""

    library: str
    total: Spread


class Recoveries(msgspec.Struct, frozen=True):
    """The output of `python docs/experiments/recovery_ulfm.py --json`."""

    holdfast: RecoveryBench
    peer: PeerRecovery


def _collectives(folder: Path) -> Iterator[tuple[str, str]]:
    """Bus bandwidth of each op, and the time of small all_reduces."""
    for path in sorted((folder / "bench").glob("*.json")):
        bench = msgspec.json.decode(path.read_bytes(), type=Bench)
        draw = report.times if path.stem == "small" else report.bandwidths
        for name, chart in draw(bench):
            yield f"bench-{name}.svg", chart.svg(name, standalone=True)


def _recovery(folder: Path) -> Iterator[tuple[str, str]]:
    path = folder / "recovery.json"
    if not path.is_file():
        raise FileNotFoundError(path)
    found = msgspec.json.decode(path.read_bytes(), type=Recoveries)
    ours, theirs = found.holdfast, found.peer
    bars = [
        PercentileBar(f"holdfast over {ours.backend}", ours.total.median, ours.total.p90, ours.total.p99, 0),
        PercentileBar(theirs.library, theirs.total.median, theirs.total.p90, theirs.total.p99, 1),
    ]
    kills = counted(len(ours.kills), "kill")
    heading = f"SIGKILL of 1 of {ours.ranks} ranks in an all_reduce, to the survivors' next: {kills} each"
    chart = draw_bars(heading, bars, lambda milliseconds: show_time(1e3 * milliseconds))
    yield "recovery.svg", chart.svg(heading, standalone=True)


@dataclass(frozen=True, slots=True)
class PercentileBar:
    """One of several in a row: median, p90 and p99 of something, in the unit of the axis."""

    name: str
    median: float
    p90: float
    p99: float
    colour: int


def draw_bars(heading: str, bars: Sequence[PercentileBar], show: Callable[[float], str]) -> Chart:
    """Horizontal bars on a linear axis from 0: solid to the median, paler to p90, palest to p99."""
    chart = Chart(WIDTH, 76 + 46.0 * len(bars))
    axes = chart.axes
    axes.set_title(heading, weight="bold", loc="left")
    axes.set_xlim(0, 1.1 * max(bar.p99 for bar in bars))
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], color=light("ink"))
    axes.xaxis.set_major_formatter(lambda value, _: show(value))
    axes.grid(axis="x")
    for index, bar in enumerate(bars):
        for value, alpha in ((bar.p99, 0.18), (bar.p90, 0.35), (bar.median, 1.0)):
            (drawn,) = axes.barh(index, value, 0.56, color=light(f"s{bar.colour % SERIES}"), alpha=alpha, linewidth=0)
            words = f"{bar.name}: median {show(bar.median)}, p90 {show(bar.p90)}, p99 {show(bar.p99)}"
            chart.mark(drawn, words, "bar")
        axes.annotate(show(bar.median), (bar.p99, index), (8, 0), textcoords="offset points", va="center", size=12.5)
    return chart


def _store(folder: Path) -> Iterator[tuple[str, str]]:
    """The times of the weight store and of its peers, and their tables."""
    bench = msgspec.json.decode((folder / "store.json").read_bytes(), type=StoreBench)
    yield "store.md", _markdown(bench)
    yield "store.svg", _times(bench).svg("times of the weight store and of its peers", standalone=True)


def _markdown(bench: StoreBench) -> str:
    """The run of the store bench as Markdown."""
    lines = [f"`{bench.command}`", "", f"{describe(bench.machine, threads_of(bench))}.", ""]
    lines += [f"- {name}: {detail}" for name, detail in bench.contestants.items()]
    lines += [f"- {name} was left out: {reason}" for name, reason in bench.skipped.items()]
    for workload in bench.workloads:
        if rows := [row for row in bench.rows if row.workload == workload]:
            lines += [
                "",
                f"**{heading(bench, workload, rows)}**",
                "",
                *_markdown_lines(table_of(bench, workload, rows)),
            ]
    return "\n".join([*lines, "", f"{CAPTION}. {counted(bench.wrong, 'tensor')} came out wrong."])


def _markdown_lines(table: FoldingTable) -> list[str]:
    """A table of texts as Markdown, without its title and caption."""
    rows = zip(*([column.header, *column.cells] for column in table.columns), strict=True)
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return [head, "|---" * len(table.columns) + "|", *body]


def _times(bench: StoreBench) -> Chart:
    """The median time of each figure and contestant, with whiskers from min to p99."""
    workloads = [name for name in bench.workloads if any(row.workload == name for row in bench.rows)]
    names = list(dict.fromkeys(row.contestant for row in bench.rows))
    heights = [64 + 22.0 * sum(row.workload == name for row in bench.rows) for name in workloads]
    chart = Chart(1000, sum(heights), heights)
    for name, axes in zip(workloads, chart.all_axes, strict=True):
        rows = [row for row in bench.rows if row.workload == name]
        axes.set_title(heading(bench, name, rows), loc="left", fontsize=12)
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
    return chart


def _chaos(folder: Path) -> Iterator[tuple[str, str]]:
    """The timeline of a chaos report, with the style of its page."""
    report = (folder / "chaos" / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", report, re.DOTALL)
    for drawing in re.findall(r'<div class="chart">\s*(<svg.*?</svg>)', report, re.DOTALL):
        if f'aria-label="{TIMELINE}"' in drawing and style is not None:
            start = drawing.index(">") + 1
            ground = '<rect width="100%" height="100%" rx="14" style="fill: var(--panel)"/>'
            yield "chaos-timeline.svg", f"{drawing[:start]}<style>{style[1]}{FONT}</style>{ground}{drawing[start:]}"
            return
    raise ValueError(f"there is no timeline in {folder / 'chaos' / 'report.html'}")


SOURCES: tuple[Callable[[Path], Iterator[tuple[str, str]]], ...] = (_collectives, _recovery, _store, _chaos)


def draw(folder: Path) -> tuple[list[Path], list[str]]:
    """Draw pictures and tables beside the data files; returns them, and messages on what is missing."""
    drawn, missing = [], []
    for source in SOURCES:
        try:
            for name, text in source(folder):
                path = folder / name
                path.write_text(text + "\n", encoding="utf-8")
                drawn.append(path)
        except FileNotFoundError as error:
            missing.append(f"no {error.filename or error}")
    return drawn, missing


if __name__ == "__main__":
    made, absent = draw(Path(sys.argv[1]))
    for each in made:
        print(each)
    for words in absent:
        print(f"missing: {words}; make figures-data", file=sys.stderr)
    sys.exit(1 if absent else 0)
