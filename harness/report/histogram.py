"""A histogram: a bar a count, with the counts above and the labels below."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.harness.report.model import Bar
from holdfast.harness.report.svg import drawing, element, line, text, title

WIDTH, HEIGHT = 480.0, 220.0
SIDE, TOP, BOTTOM = 12.0, 28.0, 32.0
SHARE = 0.72
"""The share of its column that a bar fills."""
_WIDEST = 90.0


def draw_histogram(bars: Sequence[Bar], label: str) -> str:
    """The SVG. Without bars it has an axis only."""
    most, floor = max((bar.count for bar in bars), default=0) or 1, HEIGHT - BOTTOM
    column = (WIDTH - 2 * SIDE) / max(1, len(bars))
    width = min(_WIDEST, column * SHARE)
    parts = [line(SIDE, floor, WIDTH - SIDE, floor, "grid")]
    for index, bar in enumerate(bars):
        middle = SIDE + (index + 0.5) * column
        height = (floor - TOP) * bar.count / most
        words = title(f"{bar.label}: {bar.count:,}")
        parts.append(
            element(
                "rect", words, x=middle - width / 2, y=floor - height, width=width, height=height, rx=2.0, cls="bar"
            )
        )
        parts.append(text(middle, floor - height - 6, f"{bar.count:,}", "axis", "middle"))
        parts.append(text(middle, floor + 18, bar.label, "axis", "middle"))
    return drawing(WIDTH, HEIGHT, parts, label)
