"""The charts of reports: learning curve, rates, progress, histograms, recovery times; lines of benches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.harness.report.model import Bar, Curve, FaultRecord, Point, RateSample
from holdfast.harness.report.plot import SERIES, Chart, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 1000.0
LABEL_GAP = 17.0
"""The least distance of the names of two lines, in points."""
LEAST_OUTAGE = 0.006
"""The shortest shaded stall, as a share of the run; stalls that are usual in the run are not shaded either."""
OUTAGE = "outage"
"""The class of the bands without a committed step: a picture with this word has some."""
USUAL = 8.0
"""Up to so many times the median interval between steps, a stall is usual."""


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """The moving average over `window` points, fewer at the ends."""
    sums = [0.0]
    for point in points:
        sums.append(sums[-1] + point.value)
    half, out = window // 2, []
    for index, point in enumerate(points):
        first, last = max(0, index - half), min(len(points), index + half + 1)
        out.append(Point(point.steps, (sums[last] - sums[first]) / (last - first)))
    return out


def draw_curve(curve: Curve, faults: Sequence[FaultRecord]) -> str:
    """Reward and held-out reward over steps. An empty curve has axes only."""
    chart = Chart(WIDTH, 380)
    axes, both = chart.axes, (*curve.rewards, *curve.evaluations)
    values = [point.value for point in both if math.isfinite(point.value)]
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    percent = low == 0.0 and high <= 1.0
    axes.set_xlim(0, max([point.steps for point in both], default=1) or 1)
    axes.set_ylim(low, 1.0 if percent else high)
    if percent:
        axes.set_yticks((0.0, 0.25, 0.5, 0.75, 1.0), ("0%", "25%", "50%", "75%", "100%"))
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("committed steps")
    axes.grid(axis="y")
    rewards = sorted(curve.rewards, key=lambda point: point.steps)
    for points, width, alpha in ((rewards, 1.0, 0.3), (smoothed(rewards, max(1, len(rewards) // 40)), 2.2, 1.0)):
        steps = [point.steps for point in points]
        axes.plot(steps, [point.value for point in points], color=light("reward"), linewidth=width, alpha=alpha)
    held_out = sorted(curve.evaluations, key=lambda point: point.steps)
    axes.plot([p.steps for p in held_out], [p.value for p in held_out], color=light("held-out"), linewidth=2.6)
    for point in held_out:
        dot = axes.scatter([point.steps], [point.value], s=36, color=light("held-out"), clip_on=False, zorder=4)
        chart.mark(dot, f"held-out reward after {counted(point.steps, 'step')}: {reward_text(point.value)}")
    for point, side in ((held_out[0], "left"), (held_out[-1], "right")) if len(held_out) > 1 else ():
        up = -14 if point.value > low + 0.2 * (high - low) else 14
        axes.annotate(
            reward_text(point.value), (point.steps, point.value), (0, up), textcoords="offset points", ha=side,
            va="top" if up < 0 else "bottom", weight="bold", size=12.5,
        )  # fmt: skip
    chart.faults(faults, lambda fault: fault.step, by_step=True)
    return chart.svg("Reward and held-out reward over committed steps, with the faults")


def draw_rate(rates: Sequence[RateSample], faults: Sequence[FaultRecord], seconds: float, label: str) -> str:
    """A rate over the time of a run, with the faults marked. Without rates it has axes only."""
    chart = Chart(WIDTH, 220)
    _over_time(chart, seconds, max((rate.value for rate in rates), default=1.0) or 1.0)
    chart.axes.plot([rate.time for rate in rates], [rate.value for rate in rates], color=light("reward"), linewidth=1.8)
    chart.faults(faults, lambda fault: fault.at)
    return chart.svg(label)


def _over_time(chart: Chart, seconds: float, most: float) -> None:
    axes = chart.axes
    axes.set_xlim(0, max(seconds, 1e-3))
    axes.set_ylim(0, most)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y")


def draw_progress(
    points: Sequence[tuple[float, int]], faults: Sequence[FaultRecord], seconds: float, rate: float | None
) -> str:
    """Committed steps over time.

    `points` are (seconds, steps committed by then); `rate` is in steps a second without faults.
    """
    chart, most = Chart(WIDTH, 300), max((steps for _, steps in points), default=1)
    axes = chart.axes
    _over_time(chart, seconds, max(1, most))
    axes.locator_params(axis="y", integer=True)
    axes.set_xlabel("committed steps over time")
    gaps = [(after[0] - before[0]) / max(1, after[1] - before[1]) for before, after in itertools.pairwise(points)]
    least = max(LEAST_OUTAGE * seconds, USUAL * median(gaps) if gaps else 0.0)
    for before, after in itertools.pairwise(points):
        if after[0] - before[0] > least and after[1] - before[1] <= 1:
            band = axes.axvspan(before[0], after[0], color=light("fault"), alpha=0.12, linewidth=0)
            chart.mark(band, f"no step was committed for {after[0] - before[0]:.3g} s", OUTAGE)
    if rate and points:
        start, first = points[0]
        end = min(seconds, start + (most - first) / rate)
        ideal = (first, first + (end - start) * rate)
        axes.plot((start, end), ideal, color=light("muted"), linewidth=1.4, linestyle=(0, (5, 4)))
    axes.plot([at for at, _ in points], [steps for _, steps in points], color=light("reward"), linewidth=2.2)
    chart.faults(faults, lambda fault: fault.at)
    return chart.svg("Committed steps over time, with the faults")


def draw_histogram(bars: Sequence[Bar], label: str) -> str:
    """A bar a count, with the counts above and the labels below. Without bars it has an axis only."""
    chart = Chart(480, 220)
    axes, most = chart.axes, max((bar.count for bar in bars), default=0) or 1
    axes.set_ylim(0, 1.12 * most)
    axes.set_xlim(-0.5 - 0.5 * (len(bars) < 4), max(1, len(bars)) - 0.5 + 0.5 * (len(bars) < 4))
    axes.set_yticks(())
    axes.set_xticks(range(len(bars)), [bar.label for bar in bars])
    axes.axhline(0, color=light("line"), linewidth=1)
    for index, bar in enumerate(bars):
        drawn = axes.bar(index, bar.count, 0.72, color=light("reward"))
        chart.mark(drawn[0], f"{bar.label}: {bar.count:,}")
        axes.annotate(
            f"{bar.count:,}",
            (index, bar.count),
            (0, 4),
            textcoords="offset points",
            ha="center",
            size=12,
            color=light("muted"),
        )
    return chart.svg(label)


def draw_strip(rows: Mapping[str, Sequence[tuple[float, str]]]) -> str:
    """One dot a fault on a logarithmic axis, a row a stage, the median marked. `rows`: (seconds, of what)."""
    chart = Chart(WIDTH, 50 + 42 * len(rows))
    axes = chart.axes
    values = [seconds for row in rows.values() for seconds, _ in row if seconds > 0]
    low, high = math.floor(math.log10(min(values, default=1e-3))), math.ceil(math.log10(max(values, default=1.0)))
    axes.set_xscale("log")
    axes.set_xlim(10.0**low, 10.0 ** max(high, low + 1))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), list(rows), color=light("ink"))
    powers = [10.0**power for power in range(low, max(high, low + 1) + 1)]
    axes.set_xticks(powers, [coarse_seconds(power) for power in powers])
    axes.minorticks_off()
    axes.grid(axis="x")
    for index, (name, row) in enumerate(rows.items()):
        shown = [max(seconds, 10.0**low) for seconds, _ in row]
        for place, (seconds, (_, words)) in enumerate(zip(shown, row, strict=True)):
            up = index + ((place * 7) % 5 - 2) * 0.1
            dot = axes.scatter(
                [seconds], [up], s=64, color=light(f"s{index % SERIES}"), alpha=0.7, linewidth=0, clip_on=False
            )
            chart.mark(dot, f"{words}: {name} {coarse_seconds(seconds)}")
        if shown:
            axes.plot([median(shown)] * 2, (index - 0.36, index + 0.36), color=light("ink"), linewidth=1.6)
            axes.annotate(
                f"median {coarse_seconds(median(shown))}", (1, index), (8, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center", size=12, color=light("muted"),
            )  # fmt: skip
    return chart.svg("How long each recovery took, by stage")


# Of benches -----------------------------------------------------------------------------------------------------------


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
    chart = Chart(WIDTH, 400.0)
    chart.axes.set_title(heading, weight="bold", loc="left")
    chart.axes.set_ylabel(y_name)
    draw_lines_on(chart, chart.axes, series, show_x, show_y)
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


def draw_lines_on(
    chart: Chart, axes: Axes, series: Sequence[Series], show_x: Callable[[float], str], show_y: Callable[[float], str]
) -> None:
    """All `series` on one of the axes of a chart, without their names."""
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
