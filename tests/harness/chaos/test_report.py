"""The pictures of a report: what they compute, that they stay within their axes, and that names are no markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from holdfast.harness.report.charts import Point, draw_curve, smoothed
from holdfast.harness.report.lanes import LEAST, LEFT, LONGEST, WIDTH, AxisScale, busy, draw_timeline, window
from holdfast.harness.report.model import (
    Curve,
    FaultRecord,
    Learning,
    ProcessRecord,
    RecoveryStage,
    RunReport,
    Span,
)
from holdfast.harness.report.render import render
from support.browser import pictures

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_bars_stay_within_the_axis() -> None:
    """Work that began before the run did, as the first rebuild does, must not cover the names of the lanes."""
    lane = ProcessRecord("a", "rank", 1, -3.0, 99.0, "finished")
    spans = [Span("a", "rebuild", -2.0, -1.0), Span("a", "rebuild", -1.0, 0.2), Span("a", "step", -0.5, 20.0)]
    [picture] = pictures(f'<div class="chart">{draw_timeline([lane], spans, [], 10.0)}</div>')
    bars = list(picture.iter(f"{SVG}rect"))
    assert len(bars) == 2, "one for the process, one for the rebuild that ended in the picture"
    for bar in bars:
        assert float(bar.attrib["x"]) >= LEFT
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= WIDTH


def test_rewards_beyond_one_and_below_zero_have_an_axis_of_their_own() -> None:
    for values, ticks in (((0.2, 0.9), {"0%", "100%"}), ((-1.0, 3.0), {"-1", "0", "3"})):
        points = tuple(Point(step, value) for step, value in enumerate(values))
        [curve] = pictures(f'<div class="chart">{draw_curve(Curve(points, points), ())}</div>')
        assert ticks <= set(texts(curve))
        height = float(curve.attrib["viewBox"].split()[-1])
        groups = [group for group in curve.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
        dots = [dot for group in groups for dot in group.iter(f"{SVG}use")]
        assert len(dots) == len(points)
        assert all(0 <= float(dot.attrib["y"]) <= height for dot in dots)


def test_names_are_data_and_never_markup() -> None:
    nasty = '<b onclick="x">&'
    report = RunReport(
        title=nasty,
        good=True,
        outcome=nasty,
        summary=nasty,
        when="",
        seconds=1.0,
        figures=(),
        learning=Learning(curve=Curve((Point(1, 0.5),), ())),
        lanes=(ProcessRecord(nasty, "trainer", 1, 0.0, 1.0, "killed", nasty),),
        spans=(Span(nasty, "train", 0.1, 0.9, nasty),),
        faults=(
            FaultRecord(
                words=nasty, victims=(nasty,), time=0.5, step=1, stages=(RecoveryStage(nasty, 0.1),), note=nasty
            ),
        ),
        configuration=((nasty, nasty),),
        repeat=(nasty,),
    )
    page = render(report)
    assert "<b onclick" not in page
    assert len(pictures(page)) == 3


# What the pictures compute ---------------------------------------------------------------------------------------


def test_busy_is_the_share_of_each_part_of_time() -> None:
    spans = [Span("a", "train", 0.5, 1.5), Span("a", "train", 1.25, 2.0), Span("a", "train", 3.9, 9.0)]
    assert busy(spans, 0.0, 4.0, 4) == pytest.approx([0.5, 1.0, 0.0, 0.1])


def test_smoothing_keeps_a_level_and_the_ends() -> None:
    level = [Point(step, 0.5) for step in range(10)]
    assert [point.value for point in smoothed(level, 5)] == [0.5] * 10
    assert [point.value for point in smoothed([Point(0, 0.0), Point(1, 1.0)], 1)] == [0.0, 1.0]


def test_axes_have_round_numbers() -> None:
    assert AxisScale(0, 62, 0, 1).ticks(8) == [0, 10, 20, 30, 40, 50, 60]
    assert AxisScale(-37, 112, 0, 1).ticks(4) == [0, 50, 100]
    assert AxisScale(3, 3, 0, 1).ticks(8) == [3]


def test_a_scene_shows_a_little_more_than_the_recovery_and_never_minutes() -> None:
    quick, slow = (
        FaultRecord(words="f", victims=("p",), time=10.0, step=1, stages=(RecoveryStage(name, seconds),))
        for name, seconds in (("detected", 0.001), ("replaced", 50.0))
    )
    assert window(quick) == pytest.approx((10.0 - LEAST, 10.001 + LEAST))
    assert window(slow)[1] < 10.0 + 2 * LONGEST
