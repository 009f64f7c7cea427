"""The timeline: one lane a process, from its start to its end, with its load and the injected faults.

Steps are too short to be visible at this scale: the height of a lane's filling is the share of time that it worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.model import FaultRecord, ProcessRecord, Span
from holdfast.harness.report.svg import AxisScale, badge, cross, drawing, element, line, text, title

WIDTH = 1000.0
LEFT, RIGHT, TOP = 128.0, 24.0, 44.0
LANE, GAP, BAR = 32.0, 10.0, 22.0
BUCKET = 2.0
"""The width of one sample of a lane's load."""

_ENDS = {"finished": "finished", "killed": "was killed", "lost": "was lost"}


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
    shares = busy(spans, x.low, x.high, buckets)
    path, open_at = [], False
    for index, share in enumerate(shares):
        if share > 0.0:
            path.append(
                ("V" if open_at else f"M{x.start + index * BUCKET:.0f} {bottom:.0f}V") + f"{bottom - share * BAR:.1f}"
            )
            path.append(f"h{BUCKET:g}")
        elif open_at:
            path.append(f"V{bottom:.0f}z")
        open_at = share > 0.0
    if open_at:
        path.append(f"V{bottom:.0f}z")
    return element("path", d="".join(path), cls="busy")


def words(lane: ProcessRecord) -> str:
    """A lane as text."""
    life = f"{coarse_seconds(lane.born)} to {coarse_seconds(lane.ended)}, {_ENDS[lane.fate]}"
    return f"{lane.name} (pid {lane.pid}), {lane.role}: {life}" + (f"; {lane.note}" if lane.note else "")


def _lane(lane: ProcessRecord, spans: Sequence[Span], x: AxisScale, top: float) -> list[str]:
    life = element(
        "rect",
        title(words(lane)),
        x=x.within(lane.born),
        y=top,
        width=max(1.5, x.within(lane.ended) - x.within(lane.born)),
        height=BAR,
        rx=3.0,
        cls="life",
    )
    rebuilds = [
        element("rect", title(f"{lane.name}: {span.label or 'rebuild'}, {coarse_seconds(span.end - span.start)}"),
                x=x.within(span.start), y=top, width=max(2.5, x.within(span.end) - x.within(span.start)), height=BAR,
                cls="act-rebuild")
        for span in spans if span.activity == "rebuild" and span.end > x.low
    ]  # fmt: skip
    working = [span for span in spans if span.activity != "rebuild"]
    group = element("g", life + _filling(working, x, top + BAR) + "".join(rebuilds), cls=f"role-{lane.role}")
    name = text(LEFT - 12, top + BAR / 2 + 4, lane.name, "lane-name", "end")
    return [name, group, cross(x(lane.ended), top + BAR / 2, words(lane)) if lane.fate != "finished" else ""]


def draw_timeline(
    lanes: Sequence[ProcessRecord], spans: Sequence[Span], faults: Sequence[FaultRecord], seconds: float
) -> str:
    """The SVG: lanes in the given order, roles set apart."""
    x = AxisScale(0, max(seconds, 1e-3), LEFT, WIDTH - RIGHT)
    tops, top, before = [], TOP, ""
    for lane in lanes:
        top += GAP if before not in ("", lane.role) else 0
        tops.append(top)
        top, before = top + LANE, lane.role
    bottom = top
    parts = []
    for moment in x.ticks(8):
        parts.append(line(x(moment), TOP - 6, x(moment), bottom, "grid"))
        parts.append(text(x(moment), bottom + 18, f"{moment:g} s", "axis", "middle"))
    for lane, start in zip(lanes, tops, strict=True):
        parts += _lane(lane, [span for span in spans if span.process == lane.name], x, start)
    for number, fault in enumerate(faults, start=1):
        parts.append(line(x(fault.at), TOP - 12, x(fault.at), bottom, "fault-line"))
        parts.append(
            badge(x(fault.at), TOP - 22, number, f"{fault.words} ({fault.target}) at {coarse_seconds(fault.at)}")
        )
    return drawing(WIDTH, bottom + 28, parts, "A timeline of every process of the run, with the faults")
