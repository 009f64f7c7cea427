"""The learning curve: reward and held-out rate over steps, with the faults marked."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.ft.console.units import counted, reward_text
from holdfast.harness.report.model import Curve, Point, ReportedFault
from holdfast.harness.report.svg import AxisScale, badge, drawing, element, line, polyline, text, title

WIDTH, HEIGHT = 1000.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 24.0, 44.0, 48.0


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


def _axes(x: AxisScale, y: AxisScale) -> list[str]:
    parts = []
    percent = (y.low, y.high) == (0.0, 1.0)
    for value in (0.0, 0.25, 0.5, 0.75, 1.0) if percent else y.ticks(5):
        parts.append(line(x.start, y(value), x.end, y(value), "grid"))
        parts.append(text(x.start - 8, y(value) + 4, f"{value:.0%}" if percent else f"{value:g}", "axis", "end"))
    whole = [steps for steps in x.ticks(8) if steps == int(steps)]
    parts += [text(x(steps), y.start + 20, f"{steps:,.0f}", "axis", "middle") for steps in whole]
    parts.append(text((x.start + x.end) / 2, y.start + 40, "committed steps", "axis", "middle"))
    return parts


def _evaluations(evaluations: Sequence[Point], x: AxisScale, y: AxisScale) -> list[str]:
    points = [(x(point.steps), y(point.value)) for point in evaluations]
    parts = [polyline(points, "held-out")]
    for point, (across, up) in zip(evaluations, points, strict=True):
        words = f"held-out reward after {counted(point.steps, 'step')}: {reward_text(point.value)}"
        parts.append(element("circle", title(words), cx=across, cy=up, r=4, cls="held-out-point"))
    if points:
        (across, up), value = points[0], evaluations[0].value
        parts.append(text(across + 8, up + 20 if up < y.start - 30 else up - 24, reward_text(value), "value"))
    if len(points) > 1:
        (across, up), value = points[-1], evaluations[-1].value
        parts.append(text(across, up + 34 if up < y.end + 12 else up - 16, reward_text(value), "value", "end"))
    return parts


def draw_curve(curve: Curve, faults: Sequence[ReportedFault]) -> str:
    """The SVG. An empty curve has axes only."""
    last = max([point.steps for point in (*curve.rewards, *curve.evaluations)], default=1)
    values = [point.value for point in (*curve.rewards, *curve.evaluations) if math.isfinite(point.value)]
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if low == 0.0 and high <= 1.0:
        high = 1.0
    x, y = AxisScale(0, max(1, last), LEFT, WIDTH - RIGHT), AxisScale(low, high, HEIGHT - BOTTOM, TOP)
    parts = _axes(x, y)
    rewards = sorted(curve.rewards, key=lambda point: point.steps)
    for points, cls in ((rewards, "reward-raw"), (smoothed(rewards, max(1, len(rewards) // 40)), "reward")):
        parts.append(polyline([(x(point.steps), y(point.value)) for point in points], cls))
    parts += _evaluations(sorted(curve.evaluations, key=lambda point: point.steps), x, y)
    for number, fault in enumerate(faults, start=1):
        across = x(fault.steps)
        parts.append(line(across, TOP - 12, across, y.start, "fault-line"))
        parts.append(
            badge(across, TOP - 20, number, f"{fault.title} ({fault.target}), after {counted(fault.steps, 'step')}")
        )
    return drawing(WIDTH, HEIGHT, parts, "Reward and held-out reward over committed steps, with the faults")
