"""The report of a run: its content, that it is self-contained, and how it looks in a browser."""

from __future__ import annotations

import builtins
import itertools
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from holdfast.harness.report.charts import Point, draw_curve, smoothed
from holdfast.harness.report.lanes import LEAST, LEFT, LONGEST, WIDTH, AxisScale, busy, draw_timeline, window
from holdfast.harness.report.model import (
    Curve,
    FaultRecord,
    Figure,
    Learning,
    ProcessRecord,
    RecoveryStage,
    RunReport,
    Span,
)
from holdfast.harness.report.render import render, write
from support.browser import needs_chromium, pictures, screenshot

SVG = "{http://www.w3.org/2000/svg}"


# A report with as much data as that of a real run

SECONDS = 62.0
STRUCK = {"trainer-1": 14.2, "generator-0": 26.8, "holder-1": 40.1}
PROCESSES = [
    f"{role}-{number}" for role, count in (("trainer", 3), ("generator", 2), ("holder", 2)) for number in range(count)
]


def sample_report(steps: int = 1000, outcome: str = "", faults: bool = True) -> RunReport:
    """The report of a run of `steps` steps; with `faults` a trainer, a generator and a holder were killed."""
    struck, lanes, spans = STRUCK if faults else {}, list[ProcessRecord](), list[Span]()
    for name in PROCESSES:
        role, end = name.split("-")[0], struck.get(name, SECONDS)
        lanes.append(ProcessRecord(name, role, 4100, 0.1, end, "killed" if name in struck else "finished"))
        if name in struck:
            note = f"in place of {name}"
            lanes.append(ProcessRecord(f"{name}/2", role, 4200, end + 0.01, SECONDS, "finished", note))
    for at, lane in itertools.product(np.linspace(2.5, SECONDS - 0.5, steps).tolist(), lanes):
        if lane.role != "holder" and lane.born < at < lane.ended:
            spans.append(Span(lane.name, "train", at, min(at + 0.03, lane.ended), "a step"))
    learnt = [Point(step + 1, 0.1 + 0.8 / (1 + math.exp(-(step - 370) / 105))) for step in range(steps)]
    if faults:
        spans += [Span(name, "rebuild", 14.2018, 14.2071, "233") for name in ("trainer-0", "trainer-2")]
    return RunReport(
        title="A run of reinforcement learning",
        good=not outcome,
        outcome=outcome or "all steps done",
        summary="A tiny Llama learnt to add three digits.",
        when="20 November 2025, 14:02 UTC",
        seconds=SECONDS,
        figures=(Figure("Held-out reward", "10.3% → 90.7%", "", "good"),),
        learning=Learning(curve=Curve(rewards=tuple(learnt), evaluations=tuple(learnt[::25]))),
        lanes=tuple(lanes),
        spans=tuple(spans),
        faults=tuple(map(_fault, struck)),
        configuration=(("seed", "0"),),
        repeat=("holdfast rl train run.toml",),
    )


def _fault(name: str) -> FaultRecord:
    stages = (RecoveryStage("detected", 0.0009), RecoveryStage("rebuilt", 0.0071), RecoveryStage("resumed", 0.0486))
    words = f"SIGKILL of a {name.split('-')[0]}"
    return FaultRecord(words=words, victims=(name,), time=STRUCK[name], step=233, stages=stages, note="Planned.")


@pytest.fixture(scope="module")
def page() -> str:
    return render(sample_report())


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


# What is on the page ---------------------------------------------------------------------------------------------


def test_the_report_is_one_file_for_all_screens_with_the_outcome_the_figures_and_what_each_fault_cost(
    page: str, tmp_path: Path
) -> None:
    write(sample_report(), tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert pictures(page)
    for words in ("prefers-color-scheme: dark", "max-width: 640px", 'name="viewport"'):
        assert words in page
    for words in ("✓ all steps done", "10.3% → 90.7%", "holdfast rl train run.toml", "20 November 2025, 14:02 UTC"):
        assert words in page
    undone = render(sample_report(outcome="40 of 1,000 steps done", faults=False))
    assert "✗ 40 of 1,000 steps done" in undone
    assert "Lost processes" not in undone
    table = page.split("<h2>Lost processes, and what each cost</h2>")[1].split("</table>")[0]
    assert re.search(
        r"SIGKILL of a trainer\s+Planned\.\s+trainer-1\s+14.2 s\s+\d+\s+0.9 ms\s+detected\s+7.1 ms\s+rebuilt",
        re.sub(r"<[^>]+>|\s+", " ", table),
    )


def test_every_process_has_a_lane_and_every_fault_a_mark(page: str) -> None:
    curve, timeline, *scenes = pictures(page)
    assert {lane.name for lane in sample_report().lanes} <= set(texts(timeline))
    for picture in (curve, timeline):
        assert {"1", "2", "3"} <= set(texts(picture))
    assert len(scenes) == len(STRUCK)
    assert {"detected 0.9 ms", "rebuilt 7.1 ms", "resumed 49 ms"} <= set(texts(scenes[0])), "stages of the recovery"


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


def test_a_run_that_ended_before_anything_happened_can_be_shown() -> None:
    nothing = Learning(curve=Curve((), ()))
    report = msgspec.structs.replace(
        sample_report(steps=1), learning=nothing, lanes=(), spans=(), faults=(), seconds=0.0
    )
    assert len(pictures(render(report))) == 2


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


def test_without_jinja2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("jinja2"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'holdfast[report]'")):
        render(sample_report(steps=1))


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


@pytest.mark.thorough
@needs_chromium
def test_the_report_looks_right_in_a_browser(tmp_path: Path) -> None:
    write(sample_report(), tmp_path / "report.html")
    address = (tmp_path / "report.html").as_uri()
    for width, dark in ((1200, False), (1200, True), (500, False)):
        shot = np.asarray(screenshot(address, tmp_path, width, dark)[0]).astype(int)
        assert shot[2, 2].mean() < 50 if dark else shot[2, 2].mean() > 230
        assert len({tuple(pixel) for pixel in shot[::7, ::7].reshape(-1, 3)}) > 50, "there are pictures"
        margin = shot[:, -6:].reshape(-1, 3)
        assert abs(margin - margin[0]).max() < 5, "nothing runs over the right edge"
