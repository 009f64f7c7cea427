"""Pictures of a run's processes, one lane each: of the whole run (`draw_timeline`), and of one recovery (`draw_scene`).

In a timeline steps are too short to be visible: the height of a lane's filling is the share of time that it worked. A
scene shows every call, from before a fault to after the last stage of the recovery from it. They are SVG, drawn by
hand; colours come from the page's style sheet.

"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.model import FaultRecord, ProcessRecord, Span


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


# Lanes ----------------------------------------------------------------------------------------------------------------


WIDTH = 1000.0
LEFT, RIGHT, LANE, BAR = 128.0, 24.0, 32.0, 22.0
_ENDS = {"finished": "finished", "killed": "was killed", "lost": "was lost"}


def words(lane: ProcessRecord) -> str:
    """A lane as text."""
    life = f"{coarse_seconds(lane.born)} to {coarse_seconds(lane.ended)}, {_ENDS[lane.fate]}"
    return f"{lane.name} (pid {lane.pid}), {lane.role}: {life}" + (f"; {lane.note}" if lane.note else "")


def _axis(places: Iterable[tuple[float, str]], top: float, bottom: float) -> list[str]:
    """The grid, with the words below each line."""
    parts = []
    for across, said in places:
        parts.append(line(across, top - 5, across, bottom, "grid"))
        parts.append(text(across, bottom + 17, said, "axis", "middle"))
    return parts


def _lane(lane: ProcessRecord, x: AxisScale, top: float, work: str) -> list[str]:
    """The name of a process, its life, what it did, and its end if it is in the picture."""
    begin, end = x.within(lane.born), x.within(lane.ended)
    parts = [
        text(LEFT - 12, top + BAR / 2 + 4, lane.name, "lane-name", "end"),
        element("g", _bar(begin, end, top, 1.5, words(lane), "life") + work, cls=f"role-{lane.role}"),
    ]
    if lane.fate != "finished" and x.low <= lane.ended <= x.high:
        parts.append(cross(x(lane.ended), top + BAR / 2, words(lane)))
    return parts


def _bar(begin: float, end: float, top: float, least: float, said: str, cls: str) -> str:
    """A bar between two places, at least so wide."""
    return element("rect", title(said), x=begin, y=top, width=max(least, end - begin), height=BAR, rx=2.5, cls=cls)


def _fault(fault: FaultRecord, number: int, across: float, top: float, bottom: float) -> list[str]:
    said = f"{fault.words} ({fault.target}) at {coarse_seconds(fault.at)}"
    return [line(across, top - 12, across, bottom, "fault-line"), badge(across, top - 21, number, said)]


# The whole run --------------------------------------------------------------------------------------------------------

TOP, GAP = 44.0, 10.0
BUCKET = 2.0
"""The width of one sample of a lane's load."""


def draw_timeline(
    lanes: Sequence[ProcessRecord], spans: Sequence[Span], faults: Sequence[FaultRecord], seconds: float
) -> str:
    """The SVG: lanes in the given order, roles set apart."""
    x = AxisScale(0, max(seconds, 1e-3), LEFT, WIDTH - RIGHT)
    tops, bottom, before = [], TOP, ""
    for lane in lanes:
        bottom += GAP if before not in ("", lane.role) else 0
        tops.append(bottom)
        bottom, before = bottom + LANE, lane.role
    parts = _axis(((x(moment), f"{moment:g} s") for moment in x.ticks(8)), TOP, bottom)
    for lane, top in zip(lanes, tops, strict=True):
        mine = [span for span in spans if span.process == lane.name]
        work = _filling([span for span in mine if span.activity != "rebuild"], x, top + BAR)
        for span in mine:
            if span.activity == "rebuild" and span.end > x.low:
                said = f"{lane.name}: {span.label or 'rebuild'}, {coarse_seconds(span.end - span.start)}"
                work += _bar(x.within(span.start), x.within(span.end), top, 2.5, said, "act-rebuild")
        parts += _lane(lane, x, top, work)
    for number, fault in enumerate(faults, start=1):
        parts += _fault(fault, number, x(fault.at), TOP, bottom)
    return drawing(WIDTH, bottom + 28, parts, "A timeline of every process of the run, with the faults")


def busy(spans: Iterable[Span], low: float, high: float, buckets: int) -> list[float]:
    """For each of `buckets` equal parts of the time from `low` to `high`, the share of it that spans cover.

    Spans of one process do not overlap, or count once where they do.
    """
    width = (high - low) / buckets
    shares, covered = [0.0] * buckets, low
    for span in sorted(spans, key=lambda span: span.start):
        begin, end = max(span.start, covered), min(span.end, high)
        covered = max(covered, end)
        index = int((begin - low) / width)
        while begin < end and index < buckets:
            edge = min(end, low + (index + 1) * width)
            shares[index] += max(0.0, edge - begin) / width
            begin, index = edge, index + 1
    return [min(1.0, share) for share in shares]


def _filling(spans: Sequence[Span], x: AxisScale, bottom: float) -> str:
    """The area of a lane's load, as one element."""
    buckets = int((x.end - x.start) / BUCKET)
    path, open_at = "", False
    for index, share in enumerate(busy(spans, x.low, x.high, buckets)):
        if share > 0.0:
            start = "" if open_at else f"M{x.start + index * BUCKET:.0f} {bottom:.0f}"
            path += f"{start}V{bottom - share * BAR:.1f}h{BUCKET:g}"
        elif open_at:
            path += f"V{bottom:.0f}z"
        open_at = share > 0.0
    return element("path", d=path + (f"V{bottom:.0f}z" if open_at else ""), cls="busy")


# One recovery ---------------------------------------------------------------------------------------------------------

SCENE_TOP = 66.0
LETTER = 6.9
"""The approximate width of a letter of a label."""

BEFORE, AFTER = 0.35, 0.25
"""The time shown before the fault and after the last stage, as shares of the time between."""

LEAST = 0.06
"""The least seconds shown on either side."""

LONGEST = 3.0
"""The most seconds after the fault: a picture shows only the start of a longer stage."""


def window(fault: FaultRecord) -> tuple[float, float]:
    """The start and the end of the picture of a fault."""
    recovery = min(LONGEST, max([stage.seconds for stage in fault.stages], default=0.0))
    return fault.at - max(LEAST, BEFORE * recovery), fault.at + recovery + max(LEAST, AFTER * recovery)


def _in_scene(spans: Sequence[Span], fault: FaultRecord) -> list[Span]:
    low, high = window(fault)
    return [span for span in spans if span.end > low and span.start < high]


def activities(fault: FaultRecord, spans: Sequence[Span]) -> list[str]:
    """The activities in the picture of a fault, in alphabetical order."""
    return sorted({span.activity for span in _in_scene(spans, fault)})


def draw_scene(fault: FaultRecord, number: int, lanes: Sequence[ProcessRecord], spans: Sequence[Span]) -> str:
    """The SVG: those of `lanes` that lived at the time."""
    low, high = window(fault)
    x = AxisScale(low, high, LEFT, WIDTH - RIGHT)
    alive = [lane for lane in lanes if lane.born < high and lane.ended > low]
    bottom = SCENE_TOP + LANE * len(alive)
    moments = AxisScale(1e3 * (low - fault.at), 1e3 * (high - fault.at), 0, 1).ticks(8)
    places = ((x(fault.at + moment / 1e3), _after(moment / 1e3)) for moment in moments)
    parts, shown = _axis(places, SCENE_TOP, bottom), _in_scene(spans, fault)
    for row, lane in enumerate(alive):
        top = SCENE_TOP + LANE * row + (LANE - BAR) / 2
        calls = "".join(_call(lane, span, x, top) for span in shown if span.process == lane.name)
        parts += _lane(lane, x, top, calls)
    parts += _stages(fault, x, bottom)
    parts += _fault(fault, number, x(fault.at), SCENE_TOP, bottom)
    return drawing(WIDTH, bottom + 26, parts, f"What each process did around: {fault.words}")


def _after(seconds: float) -> str:
    return "0" if seconds == 0 else ("−" if seconds < 0 else "") + coarse_seconds(abs(seconds))


def _call(lane: ProcessRecord, span: Span, x: AxisScale, top: float) -> str:
    """One call of a process, with as much of its name as it has room for."""
    left, right = x.within(span.start), x.within(min(span.end, lane.ended))
    if right <= left:
        return ""
    caption = f"{span.activity} {span.label}".rstrip()
    said = f"{lane.name}: {caption}, {coarse_seconds(span.end - span.start)}"
    label = next((each for each in (caption, span.activity) if right - left > LETTER * len(each) + 8), "")
    bar = _bar(left, right - 0.6, top, 1.2, said, f"act act-{span.activity}")
    return bar + (text(left + 5, top + BAR / 2 + 4, label, "act-label") if label else "")


def _stages(fault: FaultRecord, x: AxisScale, bottom: float) -> list[str]:
    """A labelled vertical line for each stage; labels are on further rows where lines are close."""
    parts: list[str] = []
    rows = {SCENE_TOP - 16: x(fault.at) + 14, SCENE_TOP - 32: 0.0, SCENE_TOP - 48: 0.0}
    for index, stage in enumerate(fault.stages):
        across = x(fault.at + stage.seconds)
        if across > x.end:
            continue
        parts.append(line(across, SCENE_TOP - 10, across, bottom, f"stage-line stage-{index % 5}"))
        said = f"{stage.name} {coarse_seconds(stage.seconds)}"
        width = LETTER * len(said)
        start = across if across + width < WIDTH else across - width
        for row, taken in rows.items():
            if start >= taken:
                parts.append(text(start, row, said, f"stage-label stage-{index % 5}"))
                rows[row] = start + width + 10
                break
    return parts
