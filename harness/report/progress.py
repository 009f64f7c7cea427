"""The picture of progress: committed steps over time, with the faults, beside the speed without faults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median

from holdfast.harness.report.model import ReportedFault
from holdfast.harness.report.svg import AxisScale, badge, drawing, element, line, polyline, text, title

WIDTH, HEIGHT = 1000.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 44.0, 46.0
LEAST_OUTAGE = 0.006
"""The shortest shaded stall, as a share of the run; stalls that are usual in the run are not shaded either."""
OUTAGE = "outage"
"""The class of the bands without a committed step: a picture with this word has some."""

USUAL = 8.0
"""Up to so many times the median interval between steps, a stall is usual."""


def draw_progress(
    points: Sequence[tuple[float, int]], faults: Sequence[ReportedFault], seconds: float, rate: float | None
) -> str:
    """The SVG. `points` are (seconds, steps committed by then); `rate` is in steps a second without faults."""
    most = max((steps for _, steps in points), default=1)
    x, y = AxisScale(0, max(seconds, 1e-3), LEFT, WIDTH - RIGHT), AxisScale(0, max(1, most), HEIGHT - BOTTOM, TOP)
    parts = []
    for steps in (tick for tick in y.ticks(5) if tick == int(tick)):
        parts.append(line(LEFT, y(steps), WIDTH - RIGHT, y(steps), "grid"))
        parts.append(text(LEFT - 8, y(steps) + 4, f"{steps:,.0f}", "axis", "end"))
    parts += [text(x(moment), y.start + 20, f"{moment:g} s", "axis", "middle") for moment in x.ticks(8)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, y.start + 40, "committed steps over time", "axis", "middle"))
    gaps = [(after[0] - before[0]) / max(1, after[1] - before[1]) for before, after in itertools.pairwise(points)]
    least = max(LEAST_OUTAGE * seconds, USUAL * median(gaps) if gaps else 0.0)
    for before, after in itertools.pairwise(points):
        if after[0] - before[0] > least and after[1] - before[1] <= 1:
            words = title(f"no step was committed for {after[0] - before[0]:.3g} s")
            width = x(after[0]) - x(before[0])
            parts.append(element("rect", words, x=x(before[0]), y=TOP, width=width, height=y.start - TOP, cls=OUTAGE))
    if rate and points:
        start, first = points[0]
        end = min(seconds, start + (most - first) / rate)
        parts.append(line(x(start), y(first), x(end), y(first + (end - start) * rate), "ideal"))
    parts.append(polyline([(x(moment), y(steps)) for moment, steps in points], "progress"))
    for number, fault in enumerate(faults, start=1):
        parts.append(line(x(fault.time), TOP - 12, x(fault.time), y.start, "fault-line"))
        parts.append(badge(x(fault.time), TOP - 20, number, f"{fault.title} ({fault.target})"))
    return drawing(WIDTH, HEIGHT, parts, "Committed steps over time, with the faults")
