"""A rate over the time of a run, with the faults marked."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.model import RateSample, ReportedFault
from holdfast.harness.report.svg import AxisScale, badge, drawing, line, polyline, text

WIDTH, HEIGHT = 1000.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 44.0, 32.0


def draw_rate(rates: Sequence[RateSample], faults: Sequence[ReportedFault], seconds: float, label: str) -> str:
    """The SVG. Without rates it has axes only."""
    x = AxisScale(0, max(seconds, 1e-3), LEFT, WIDTH - RIGHT)
    y = AxisScale(0, max((rate.value for rate in rates), default=1.0) or 1.0, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in y.ticks(4):
        parts.append(line(x.start, y(value), x.end, y(value), "grid"))
        parts.append(text(x.start - 8, y(value) + 4, f"{value:,.0f}", "axis", "end"))
    parts += [text(x(moment), y.start + 20, f"{moment:g} s", "axis", "middle") for moment in x.ticks(8)]
    parts.append(polyline([(x(rate.time), y(rate.value)) for rate in rates], "rate"))
    for number, fault in enumerate(faults, start=1):
        parts.append(line(x(fault.time), TOP - 12, x(fault.time), y.start, "fault-line"))
        words = f"{fault.title} ({fault.target}) at {coarse_seconds(fault.time)}"
        parts.append(badge(x(fault.time), TOP - 20, number, words))
    return drawing(WIDTH, HEIGHT, parts, label)
