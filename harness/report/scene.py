"""The picture of one recovery: the calls of each process from before the fault to after its last stage."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.model import FaultRecord, ProcessRecord, Span
from holdfast.harness.report.svg import AxisScale, badge, cross, drawing, element, line, text, title
from holdfast.harness.report.timeline import LANE, LEFT, RIGHT, WIDTH, words

TOP, BAR = 66.0, 20.0
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


def _in_scene(spans: Sequence[Span], low: float, high: float) -> list[Span]:
    return [span for span in spans if span.end > low and span.start < high]


def draw_scene(fault: FaultRecord, number: int, lanes: Sequence[ProcessRecord], spans: Sequence[Span]) -> str:
    """The SVG: those of `lanes` that lived at the time."""
    low, high = window(fault)
    x = AxisScale(low, high, LEFT, WIDTH - RIGHT)
    alive = [lane for lane in lanes if lane.born < high and lane.ended > low]
    bottom = TOP + LANE * len(alive)
    parts = []
    for moment in AxisScale(1e3 * (low - fault.at), 1e3 * (high - fault.at), 0, 1).ticks(8):
        across = x(fault.at + moment / 1e3)
        parts.append(line(across, TOP - 4, across, bottom, "grid"))
        parts.append(text(across, bottom + 16, _after(moment / 1e3), "axis", "middle"))
    for row, lane in enumerate(alive):
        top = TOP + LANE * row + (LANE - BAR) / 2
        parts.append(text(LEFT - 12, top + BAR / 2 + 4, lane.name, "lane-name", "end"))
        parts += _lane(lane, _in_scene([span for span in spans if span.process == lane.name], low, high), x, top)
    parts += _stages(fault, x, bottom)
    parts.append(line(x(fault.at), TOP - 12, x(fault.at), bottom, "fault-line"))
    parts.append(badge(x(fault.at), TOP - 20, number, f"{fault.words} ({fault.target})"))
    return drawing(WIDTH, bottom + 26, parts, f"What each process did around: {fault.words}")


def activities(fault: FaultRecord, spans: Sequence[Span]) -> list[str]:
    """The activities in the picture of a fault, in alphabetical order."""
    return sorted({span.activity for span in _in_scene(spans, *window(fault))})


def _after(seconds: float) -> str:
    return "0" if seconds == 0 else ("−" if seconds < 0 else "") + coarse_seconds(abs(seconds))


def _lane(lane: ProcessRecord, spans: Sequence[Span], x: AxisScale, top: float) -> list[str]:
    begin, end = x.within(lane.born), x.within(lane.ended)
    parts = [
        element("rect", title(words(lane)), x=begin, y=top, width=max(1.0, end - begin), height=BAR, rx=3.0,
                cls=f"life role-{lane.role}")
    ]  # fmt: skip
    for span in spans:
        left, right = x.within(span.start), x.within(min(span.end, lane.ended))
        if right <= left:
            continue
        said = f"{lane.name}: {span.activity} {span.label}".rstrip() + f", {coarse_seconds(span.end - span.start)}"
        parts.append(
            element("rect", title(said), x=left, y=top, width=max(1.2, right - left - 0.6), height=BAR, rx=2.0,
                    cls=f"act act-{span.activity}")
        )  # fmt: skip
        caption = f"{span.activity} {span.label}".rstrip()
        for wording in (caption, span.activity):
            if right - left > LETTER * len(wording) + 8:
                parts.append(text(left + 5, top + BAR / 2 + 4, wording, "act-label"))
                break
    if lane.fate != "finished" and x.low <= lane.ended <= x.high:
        parts.append(cross(x(lane.ended), top + BAR / 2, words(lane)))
    return parts


def _stages(fault: FaultRecord, x: AxisScale, bottom: float) -> list[str]:
    """A labelled vertical line for each stage; labels are on two rows where lines are close."""
    parts: list[str] = []
    rows = {TOP - 16: x(fault.at) + 14, TOP - 32: 0.0, TOP - 48: 0.0}
    for index, stage in enumerate(fault.stages):
        across = x(fault.at + stage.seconds)
        if across > x.end:
            continue
        parts.append(line(across, TOP - 10, across, bottom, f"stage-line stage-{index % 5}"))
        said = f"{stage.name} {coarse_seconds(stage.seconds)}"
        width = LETTER * len(said)
        start = across if across + width < WIDTH else across - width
        for row, taken in rows.items():
            if start >= taken:
                parts.append(text(start, row, said, f"stage-label stage-{index % 5}"))
                rows[row] = start + width + 10
                break
    return parts
