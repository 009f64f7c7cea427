"""Charts of a bench as SVG: lines over sizes or ranks on logarithmic axes, with a roofline, and bars.

Colours are CSS classes: the style sheet of the page, or `STYLE` in a standalone picture, makes them light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.harness.report.svg import AxisScale, drawing, element, line, polyline, text, title

WIDTH, HEIGHT = 1000.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 190.0, 44.0, 50.0
COLOURS = 7
LABEL_GAP = 17.0

STYLE = """
svg { --ink: #1b1c22; --muted: #676a76; --line: #e4e2dc; --panel: #ffffff; --roof: #a8a5a0;
  --s0: #3b5bdb; --s1: #d9480f; --s2: #0b7a4b; --s3: #9c36b5; --s4: #0c8599; --s5: #a07800; --s6: #c2255c; }
@media (prefers-color-scheme: dark) { svg { --ink: #e9e9ee; --muted: #9c9eab; --line: #2d2f38; --panel: #191a20;
  --roof: #6f7280; --s0: #8aa2ff; --s1: #ff8a4c; --s2: #51cf8a; --s3: #c277dc; --s4: #2fb5c9; --s5: #f2bd4b;
  --s6: #ff7aa2; } }
svg text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
svg .ground { fill: var(--panel); }
"""

SERIES_STYLE = (
    """
svg .axis { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .heading { font-size: 15px; font-weight: 640; }
svg .roof { fill: none; stroke: var(--roof); stroke-width: 2; stroke-dasharray: 5 4; }
svg .roof-area { fill: var(--roof); opacity: 0.1; }
svg .series { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .series.ours { stroke-width: 3; }
svg .label { font-size: 12.5px; } svg .label.ours { font-weight: 650; } svg .label.roofed { fill: var(--muted); }
"""
    + "".join(
        f"svg .series.c{i} {{ stroke: var(--s{i}); }} svg .dot.c{i}, svg .bar.c{i}, svg .label.c{i} "
        f"{{ fill: var(--s{i}); }}\n"
        for i in range(COLOURS)
    )
    + "svg .bar.faint { opacity: 0.35; } svg .bar.fainter { opacity: 0.18; }\n"
)


@dataclass(frozen=True, slots=True)
class Series:
    """A line through `points` (x, y), both above 0; a `roof` is a bound of the machine."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int
    ours: bool = False
    roof: bool = False


def draw_lines(
    heading: str,
    series: Sequence[Series],
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    y_name: str,
    standalone: bool = False,
) -> str:
    """The SVG of all `series` over logarithmic axes; each is named at its right end. ValueError without points."""
    points = [point for each in series for point in each.points]
    if not points:
        raise ValueError("there is nothing to draw")
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    across = AxisScale(math.log2(xs[0]), math.log2(xs[-1]), LEFT, WIDTH - RIGHT)
    up = AxisScale(*_whole_decades(min(ys), max(ys)), HEIGHT - BOTTOM, TOP)

    def place(x: float, y: float) -> tuple[float, float]:
        return across(math.log2(x)), up(math.log10(y))

    parts = _axes(heading, xs, across, up, show_x, show_y, y_name)
    for each in sorted(series, key=lambda each: (not each.roof, each.ours)):
        placed = [place(x, y) for x, y in each.points]
        if each.roof:
            corners = [*placed, (placed[-1][0], TOP), (placed[0][0], TOP)]
            parts.append(element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners), cls="roof-area"))
            parts.append(polyline(placed, "roof"))
            continue
        parts.append(polyline(placed, f"series c{each.colour % COLOURS}{' ours' * each.ours}"))
        for (x, y), (left, top) in zip(each.points, placed, strict=True):
            words = title(f"{each.name}, {show_x(x)}: {show_y(y)}")
            parts.append(element("circle", words, cx=left, cy=top, r=3.2, cls=f"dot c{each.colour % COLOURS}"))
    parts += _labels(series, [place(*each.points[-1])[1] for each in series])
    return _finish(parts, heading, HEIGHT, standalone)


def _whole_decades(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis, as powers of ten, that leave a little room."""
    return math.log10(low) - 0.08, math.log10(high) + 0.08


def _axes(
    heading: str,
    xs: Sequence[float],
    across: AxisScale,
    up: AxisScale,
    show_x: Callable[[float], str],
    show_y: Callable[[float], str],
    y_name: str,
) -> list[str]:
    parts = [text(LEFT - 40, 20, heading, "heading"), text(WIDTH - RIGHT, 20, y_name, "axis", "end")]
    steps = (1, 2, 5) if up.high - up.low < 2.2 else (1,)
    for decade in range(math.floor(up.low), math.ceil(up.high) + 1):
        for step in steps:
            height = math.log10(step) + decade
            if up.low <= height <= up.high:
                parts.append(line(across.start, up(height), across.end, up(height), "grid"))
                parts.append(text(across.start - 8, up(height) + 4, show_y(step * 10.0**decade), "axis", "end"))
    last = -math.inf
    for x in xs:
        at = across(math.log2(x))
        if at - last > 52:
            parts.append(text(at, HEIGHT - BOTTOM + 22, show_x(x), "axis", "middle"))
            last = at
    return parts


def _labels(series: Sequence[Series], heights: Sequence[float]) -> list[str]:
    """The names at the right, moved apart where they would overlap."""
    order = sorted(range(len(series)), key=lambda index: heights[index])
    parts, lowest = [], -math.inf
    for index in order:
        each, at = series[index], max(heights[index], lowest + LABEL_GAP)
        lowest = at
        cls = "label roofed" if each.roof else f"label c{each.colour % COLOURS}{' ours' * each.ours}"
        parts.append(text(WIDTH - RIGHT + 10, at + 4, each.name, cls))
    return parts


@dataclass(frozen=True, slots=True)
class PercentileBar:
    """One of several in a row: median, p90 and p99 of something, in the unit of the axis."""

    name: str
    median: float
    p90: float
    p99: float
    colour: int


def draw_bars(
    heading: str, bars: Sequence[PercentileBar], show: Callable[[float], str], standalone: bool = False
) -> str:
    """Horizontal bars on a linear axis from 0: solid to the median, paler to p90, palest to p99."""
    height, left = TOP + 46.0 * len(bars) + 34, 250.0
    along = AxisScale(0, max(bar.p99 for bar in bars), left, WIDTH - 90)
    parts = [text(LEFT - 40, 20, heading, "heading")]
    for tick in along.ticks(6):
        parts.append(line(along(tick), TOP - 8, along(tick), height - 30, "grid"))
        parts.append(text(along(tick), height - 12, show(tick), "axis", "middle"))
    for index, bar in enumerate(bars):
        top = TOP + 46.0 * index
        parts.append(text(left - 12, top + 17, bar.name, "label", "end"))
        for value, cls in ((bar.p99, "fainter"), (bar.p90, "faint"), (bar.median, "")):
            words = title(f"{bar.name}: median {show(bar.median)}, p90 {show(bar.p90)}, p99 {show(bar.p99)}")
            parts.append(
                element(
                    "rect", words, x=left, y=top, width=max(1.0, along(value) - left), height=26, rx=4,
                    cls=f"bar c{bar.colour % COLOURS} {cls}",
                )
            )  # fmt: skip
        parts.append(text(along(bar.p99) + 8, top + 17, show(bar.median), "label"))
    return _finish(parts, heading, height, standalone)


def _finish(parts: Sequence[str], heading: str, height: float, standalone: bool) -> str:
    if standalone:
        ground = element("rect", width=WIDTH, height=height, rx=14, cls="ground")
        parts = [element("style", STYLE + SERIES_STYLE), ground, *parts]
    return drawing(WIDTH, height, parts, heading)
