"""Draws SVG: elements as text, scales, and round numbers for axes. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


def element(tag: str, inner: str = "", **attributes: object) -> str:
    """An element. `cls` is its class, and underscores in names are hyphens; numbers have two decimals."""
    parts = []
    for name, value in attributes.items():
        text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        parts.append(f' {"class" if name == "cls" else name.replace("_", "-")}="{escape(text)}"')
    return f"<{tag}{''.join(parts)}>{inner}</{tag}>"


def text(x: float, y: float, words: str, cls: str, anchor: str = "start") -> str:
    """A text with its baseline at y."""
    return element("text", escape(words), x=x, y=y, cls=cls, text_anchor=anchor)


def title(words: str) -> str:
    """The tooltip of the element around it."""
    return element("title", escape(words))


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, cls=cls)


def badge(x: float, y: float, number: int, words: str) -> str:
    """The numbered mark of a fault."""
    disc = element("circle", cx=x, cy=y, r=9)
    return element("g", title(words) + disc + text(x, y + 4, str(number), "badge-number", "middle"), cls="badge")


def cross(x: float, y: float, words: str) -> str:
    """The mark of a death."""
    arm = 5.5
    d = f"M{x - arm:.1f} {y - arm:.1f}l{2 * arm:g} {2 * arm:g}m0 {-2 * arm:g}l{-2 * arm:g} {2 * arm:g}"
    return element("path", d=d, cls="death-halo") + element("path", title(words), d=d, cls="death")


def drawing(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """The whole picture; `label` is its text alternative."""
    return element(
        "svg",
        "".join(parts),
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)

    def within(self, value: float) -> float:
        """The place of a value; that of the nearer end for one outside of the axis."""
        return self(min(max(value, self.low), self.high))

    def ticks(self, about: int) -> list[float]:
        """About `about` round values within the range."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        rough = span / max(1, about)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(index * step, 12) for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
