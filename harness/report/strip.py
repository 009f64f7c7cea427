"""The picture of recovery times: one dot a fault on a logarithmic axis, one row a stage, the median marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.svg import AxisScale, drawing, element, line, text, title

WIDTH, ROW = 1000.0, 42.0
LEFT, RIGHT, TOP, BOTTOM = 128.0, 110.0, 14.0, 30.0


def draw_strip(rows: Mapping[str, Sequence[tuple[float, str]]]) -> str:
    """The SVG. `rows` by stage: (seconds, of what) for each fault."""
    values = [seconds for row in rows.values() for seconds, _ in row if seconds > 0]
    low, high = math.floor(math.log10(min(values, default=1e-3))), math.ceil(math.log10(max(values, default=1.0)))
    high = max(high, low + 1)
    x = AxisScale(low, high, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(rows)
    parts = []
    for power in range(low, high + 1):
        parts.append(line(x(power), TOP, x(power), bottom, "grid"))
        parts.append(text(x(power), bottom + 18, coarse_seconds(10.0**power), "axis", "middle"))
    for index, (name, row) in enumerate(rows.items()):
        middle = TOP + ROW * (index + 0.5)
        parts.append(text(LEFT - 12, middle + 4, name, "lane-name", "end"))
        ordered = sorted(max(seconds, 10.0**low) for seconds, _ in row)
        for place, (seconds, words) in enumerate(row):
            across = x(math.log10(max(seconds, 10.0**low)))
            up = middle + ((place * 7) % 5 - 2) * 4
            said = title(f"{words}: {name} {coarse_seconds(seconds)}")
            parts.append(element("circle", said, cx=across, cy=up, r=4.5, cls=f"dot dot-{index % 4}"))
        if ordered:
            middle_value = median(ordered)
            across = x(math.log10(middle_value))
            parts.append(line(across, middle - 15, across, middle + 15, "median"))
            parts.append(text(WIDTH - RIGHT + 10, middle + 4, f"median {coarse_seconds(middle_value)}", "axis"))
    return drawing(WIDTH, bottom + BOTTOM, parts, "How long each recovery took, by stage")
