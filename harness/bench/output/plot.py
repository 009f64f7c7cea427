"""The charts of a bench: bus bandwidth under the machine's roofline, times over sizes and ranks, percentiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.ft.console.units import counted, format_bytes
from holdfast.harness.bench.collectives.contestants import MEMCPY
from holdfast.harness.bench.collectives.ranks import HOLDFAST
from holdfast.harness.bench.output.results import Bench, BenchRow
from holdfast.harness.measure.show import show_time
from holdfast.harness.report.plot import SERIES, Chart, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOF = "copy in memory"
"""The label of `memcpy`: all ranks at once copy as many bytes in their own memory."""
WIDTH, HEIGHT = 1000.0, 400.0
LABEL_GAP = 17.0
"""The least distance of the names of two lines, in points."""


def short(contestant: str) -> str:
    """The name of a contestant in charts and tables."""
    return ROOF if contestant == MEMCPY else contestant.removeprefix(HOLDFAST)


@dataclass(frozen=True, slots=True)
class Series:
    """A line through `points` (x, y), both above 0; a `roof` is a bound of the machine."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    ours: bool = False
    roof: bool = False

    @property
    def paint(self) -> str:
        return light("roof" if self.roof else f"s{self.colour % SERIES}")


def draw_lines(
    heading: str, series: Sequence[Series], show_x: Callable[[float], str], show_y: Callable[[float], str], y_name: str
) -> Chart:
    """All `series` over logarithmic axes; each is named at its right end. Raises ValueError without points."""
    if not any(each.points for each in series):
        raise ValueError("there is nothing to draw")
    chart = Chart(WIDTH, HEIGHT)
    chart.axes.set_title(heading, weight="bold", loc="left")
    chart.axes.set_ylabel(y_name)
    _lines(chart, chart.axes, series, show_x, show_y)
    chart.figure.draw_without_rendering()  # where the axes are
    points = 72 / chart.figure.dpi
    heights = {each.name: points * chart.axes.transData.transform(each.points[-1])[1] for each in series}
    lowest = -math.inf
    for each in sorted(series, key=lambda each: heights[each.name]):
        at = max(heights[each.name], lowest + LABEL_GAP)
        lowest = at
        chart.axes.annotate(
            each.name, (1, each.points[-1][1]), (12, at - heights[each.name]), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", size=12.5, weight="bold" if each.ours else "normal",
            color=light("muted") if each.roof else each.paint, annotation_clip=False,
        )  # fmt: skip
    return chart


def _lines(
    chart: Chart, axes: Axes, series: Sequence[Series], show_x: Callable[[float], str], show_y: Callable[[float], str]
) -> None:
    xs = sorted({x for each in series for x, _ in each.points})
    ys = [y for each in series for _, y in each.points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(xs[0], xs[-1] if len(xs) > 1 else 2 * xs[0])
    axes.set_ylim(min(ys) / 1.2, max(ys) * 1.2)
    axes.set_xticks(xs[:: -(-len(xs) // 14)], [show_x(x) for x in xs[:: -(-len(xs) // 14)]])
    steps = (1, 2, 5) if max(ys) / min(ys) < 100 else (1,)
    decades = range(math.floor(math.log10(min(ys))) - 1, math.ceil(math.log10(max(ys))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if min(ys) / 1.2 <= tick <= 1.2 * max(ys)]
    axes.set_yticks(ticks, [show_y(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    for each in sorted(series, key=lambda each: (not each.roof, each.ours)):
        at, values = [x for x, _ in each.points], [y for _, y in each.points]
        if each.roof:
            (roof,) = axes.plot(at, values, color=each.paint, linewidth=2, linestyle=(0, (5, 4)))
            chart.mark(roof, cls="roof")
            axes.fill_between(at, values, 1.2 * max(ys), color=each.paint, alpha=0.1, linewidth=0)
            continue
        axes.plot(at, values, color=each.paint, linewidth=3 if each.ours else 1.8, clip_on=False)
        for x, y in each.points:
            dot = axes.scatter([x], [y], s=22, color=each.paint, clip_on=False, zorder=3)
            chart.mark(dot, f"{each.name}, {show_x(x)}: {show_y(y)}")


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


# Of collectives -------------------------------------------------------------------------------------------------------


def _bandwidth(value: float) -> str:
    return f"{value:.3g}"


def _ranks(value: float) -> str:
    return f"{value:.0f} ranks"


def _size(value: float) -> str:
    return format_bytes(int(value))


def _colours(bench: Bench) -> dict[str, int]:
    """A colour for each contestant, ours first."""
    names = dict.fromkeys(row.contestant for row in bench.rows)
    return {name: index for index, name in enumerate(sorted(names, key=lambda name: not name.startswith(HOLDFAST)))}


def _series(rows: list[BenchRow], colours: dict[str, int], over_ranks: bool, bandwidth: bool) -> list[Series]:
    found = []
    for name in sorted({row.contestant for row in rows}, key=colours.__getitem__):
        mine = sorted((row for row in rows if row.contestant == name), key=lambda row: (row.ranks, row.nbytes))
        points = tuple(
            (float(row.ranks if over_ranks else row.nbytes), row.busbw if bandwidth else row.timing.p50) for row in mine
        )
        found.append(Series(short(name), points, colours[name], name.startswith(HOLDFAST), name == MEMCPY))
    return found


def _with_sizes(bench: Bench) -> Iterator[tuple[str, int, list[BenchRow]]]:
    """Each op and number of ranks, with its rows of several sizes."""
    for op, ranks in dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks) and row.nbytes]
        if len({row.nbytes for row in rows}) > 1:
            yield op, ranks, rows


def bandwidths(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a name and a chart of bus bandwidth over size for each op and number of ranks."""
    colours = _colours(bench)
    for op, ranks, rows in _with_sizes(bench):
        series = _series(rows, colours, over_ranks=False, bandwidth=True)
        heading = f"{op}, {counted(ranks, 'rank')}"
        yield f"{op}-{ranks}", draw_lines(heading, series, _size, _bandwidth, "bus bandwidth, GB/s")


def times(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a name and a chart of time over size, without the roofline, for each op and number of ranks."""
    colours = _colours(bench)
    for op, ranks, rows in _with_sizes(bench):
        series = _series([row for row in rows if row.contestant != MEMCPY], colours, over_ranks=False, bandwidth=False)
        if series:
            heading = f"{op}, {counted(ranks, 'rank')}"
            yield f"{op}-{ranks}-time", draw_lines(heading, series, _size, show_time, "p50")


def sweeps(bench: Bench) -> Iterator[tuple[str, Chart]]:
    """Yield a chart of time over ranks for each op and size measured with several numbers of ranks."""
    colours = _colours(bench)
    for op, size in dict.fromkeys((row.op, _nominal(row.nbytes)) for row in bench.rows):
        rows = [row for row in bench.rows if (row.op, _nominal(row.nbytes)) == (op, size) and row.contestant != MEMCPY]
        if len({row.ranks for row in rows}) > 1:
            series = _series(rows, colours, over_ranks=True, bandwidth=False)
            heading = f"{op}{f' of {format_bytes(size)}' if size else ''}"
            yield f"{op}-{size}-ranks", draw_lines(heading, series, _ranks, show_time, "p50")


def _nominal(nbytes: int) -> int:
    """The requested size: `nbytes` may be a little less, so that the ranks divide it."""
    power = 1 << max(0, nbytes - 1).bit_length()
    return power if nbytes and power - nbytes < power // 8 else nbytes


def check_plot(path: Path) -> None:
    """Raise ValueError if a picture cannot be written to `path`; for use before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("plots need matplotlib: pip install 'holdfast[report]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path} does not say what to write: end it with .png or .svg ({', '.join(sorted(known))})")


def plot(bench: Bench, path: Path) -> None:
    """Write a picture: for each op and number of ranks the time, and below it the bus bandwidth.

    Raises ValueError if there is nothing to plot. `check_plot` says whether it can be written.
    """
    pairs = list(dict.fromkeys((row.op, row.ranks) for row in bench.rows if row.nbytes))
    if not pairs:
        raise ValueError("there is nothing to plot: no op with a size was measured")
    chart, colours = Chart(WIDTH, 640.0 * len(pairs), [1.0] * 2 * len(pairs)), _colours(bench)
    for index, (op, ranks) in enumerate(pairs):
        rows = [row for row in bench.rows if (row.op, row.ranks) == (op, ranks)]
        time_axes, bandwidth_axes = chart.all_axes[2 * index : 2 * index + 2]
        without_roof = [row for row in rows if row.contestant != MEMCPY] or rows
        _lines(chart, time_axes, _series(without_roof, colours, False, False), _size, show_time)
        _lines(chart, bandwidth_axes, _series(rows, colours, False, True), _size, _bandwidth)
        time_axes.set_title(f"{op}, {counted(ranks, 'rank')}", weight="bold", loc="left")
        time_axes.set_ylabel("p50 of an op")
        bandwidth_axes.set_ylabel("bus bandwidth, GB/s")
        for name, colour in colours.items():
            if any(row.contestant == name for row in rows):
                paint = light("roof" if name == MEMCPY else f"s{colour % SERIES}")
                bandwidth_axes.plot([], [], color=paint, linewidth=3, label=short(name))
        bandwidth_axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    chart.save(path)
