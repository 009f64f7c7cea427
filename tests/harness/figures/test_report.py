"""Reports: what their pictures compute, and the report and the episodes' page of a run, from its events."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.harness.report.charts import Point, draw_curve, smoothed
from holdfast.harness.report.lanes import LEAST, LEFT, LONGEST, WIDTH, AxisScale, busy, draw_timeline, window
from holdfast.harness.report.model import Curve, FaultRecord, Learning, ProcessRecord, RecoveryStage, RunReport, Span
from holdfast.harness.report.render import render, write
from holdfast.harness.training.report import RunFacts, covered, episode_rows, render_episodes, report_of
from holdfast.rl.data.episode import Group, Prompt
from holdfast.rl.run.run_directory import RunDirectory
from holdfast.rl.run.run_events import (
    Activity,
    EpisodeFailed,
    Evaluated,
    Event,
    ProcessLost,
    ProcessorTime,
    ProcessStarted,
    RunResumed,
    WeightsServed,
)
from support.browser import needs_chromium, pictures, screenshot
from support.event_records import trained
from support.rl.small_batches import episode

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in picture.iter(f"{SVG}text")}


def drawn(chart: str) -> ElementTree.Element:
    [picture] = pictures(f'<div class="chart">{chart}</div>')
    return picture


def test_bars_stay_within_the_axis() -> None:
    """Work that began before the run did, as the first rebuild does, must not cover the names of the lanes."""
    lane = ProcessRecord("a", "rank", 1, -3.0, 99.0, "finished")
    spans = [Span("a", "rebuild", -2.0, -1.0), Span("a", "rebuild", -1.0, 0.2), Span("a", "step", -0.5, 20.0)]
    picture = drawn(draw_timeline([lane], spans, [], 10.0))
    bars = list(picture.iter(f"{SVG}rect"))
    assert len(bars) == 2, "one for the process, one for the rebuild that ended in the picture"
    for bar in bars:
        assert float(bar.attrib["x"]) >= LEFT
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= WIDTH


def test_rewards_beyond_one_and_below_zero_have_an_axis_of_their_own() -> None:
    for values, ticks in (((0.2, 0.9), {"0%", "100%"}), ((-1.0, 3.0), {"-1", "0", "3"})):
        points = tuple(Point(step, value) for step, value in enumerate(values))
        curve = drawn(draw_curve(Curve(points, points), ()))
        assert ticks <= texts(curve)
        height = float(curve.attrib["viewBox"].split()[-1])
        groups = [group for group in curve.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
        dots = [dot for group in groups for dot in group.iter(f"{SVG}use")]
        assert len(dots) == len(points)
        assert all(0 <= float(dot.attrib["y"]) <= height for dot in dots)


def test_names_are_data_and_never_markup(tmp_path: Path) -> None:
    nasty = '<b onclick="x">&'
    stage = RecoveryStage(nasty, 0.1)
    report = msgspec.structs.replace(
        reported(tmp_path, a_run(), title=nasty, configuration=((nasty, nasty),), repeat=(nasty,)),
        outcome=nasty,
        summary=nasty,
        lanes=(ProcessRecord(nasty, "trainer", 1, 0.0, 1.0, "killed", nasty),),
        spans=(Span(nasty, "train", 0.1, 0.9, nasty),),
        faults=(FaultRecord(words=nasty, victims=(nasty,), time=0.5, step=1, stages=(stage,), note=nasty),),
    )
    page = render(report)
    assert "<b onclick" not in page
    assert len(pictures(page)) == 6


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


# -- the report of a run


def a_run(steps: int = 40) -> list[Event]:
    """A run in which a generator is killed after 9 s, in step 17."""
    events: list[Event] = [
        ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=11),
        ProcessStarted(time=0.0, name="generator-0", role="generator", pid=12),
        Evaluated(time=0.6, version=0, reward=0.1, best=True),
    ]
    for step in range(steps):
        events.append(trained(step, 1.0 + step * 0.5))
        events.append(WeightsServed(time=1.0 + step * 0.5, version=step, process="generator-0", seconds=0.004 * step))
        events.append(
            Activity(time=1.0 + step * 0.5, process="trainer-0", role="trainer", what="train", number=step, seconds=0.3)
        )
    events += [
        ProcessLost(time=9.0, name="generator-0", role="generator", pid=12, how="was ended by SIGKILL"),
        ProcessStarted(time=9.1, name="generator-1", role="generator", pid=13, replaces="generator-0"),
        EpisodeFailed(time=9.2, prompt=7, reason="the environment died"),
        EpisodeFailed(time=9.2, prompt=8, reason="the environment died", again=True),
        EpisodeFailed(time=9.3, prompt=8, reason="the environment died", again=True),
        Evaluated(time=1.0 + steps * 0.5, version=steps, reward=0.9, best=True),
    ]
    return sorted(events, key=lambda event: event.time)


def reported(folder: Path, events: list[Event], **more: Any) -> RunReport:
    with RunDirectory(folder).open() as directory:
        directory.append(*events)
    return report_of(folder, **{"title": "A run", **more})


def test_the_report_of_a_run_shows_all_that_its_events_say(tmp_path: Path) -> None:
    report = reported(tmp_path, a_run(), configuration=(("seed", "0"),))
    assert "10.0% to 90.0%" in report.summary and "1 process died" in report.summary
    assert report.summary.endswith("1 failed episode left out. 2 episodes went on in another environment.")
    assert all(rate.value == pytest.approx(200.0) for rate in report.learning.tokens)
    assert [bar.count for bar in report.learning.staleness] == [40, 40]
    assert sum(bar.count for bar in report.learning.latencies) == 40
    assert {use.role: use.processes for use in report.learning.uses} == {"trainer": 1}, "the role that reports its work"
    assert [lane.fate for lane in report.lanes] == ["finished", "killed", "finished"]
    [fault] = report.faults
    assert (fault.target, fault.time, fault.step) == ("generator-0", 9.0, 17)
    assert [(stage.name, round(stage.seconds, 3)) for stage in fault.stages] == [
        ("another in its place", 0.1),
        ("next step", 0.5),
    ]
    assert fault.note == "The step took 0 ms longer than the median of 500 ms."


def test_the_page_is_one_file_for_all_screens_with_the_outcome_each_process_and_what_a_loss_cost(
    tmp_path: Path,
) -> None:
    report = reported(tmp_path / "run", a_run(1000), repeat=("holdfast rl resume run",))
    (tmp_path / "pages").mkdir()
    write(report, tmp_path / "pages" / "report.html")
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["report.html"]
    page = (tmp_path / "pages" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    screens = ("prefers-color-scheme: dark", "max-width: 640px", 'name="viewport"')
    charts = ("Held-out reward", "Staleness", "Weights on their way", "Policy tokens a second")
    end = ("✓ all steps done", "1,000 steps were committed", "holdfast rl resume run")
    for words in (*screens, *charts, *end, report.when):
        assert words in page
    undone = render(msgspec.structs.replace(report, good=False, outcome="40 of 1,000 steps done", faults=()))
    assert "✗ 40 of 1,000 steps done" in undone
    assert "Lost processes" not in undone
    table = page.split("<h2>Lost processes, and what each cost</h2>")[1].split("</table>")[0]
    row = " ".join(re.sub("<[^>]+>", " ", table).split())
    assert "was ended by SIGKILL The step took 0 ms longer than the median of 500 ms. generator-0 9 s 17 100 ms" in row
    assert row.endswith("100 ms another in its place 500 ms next step")
    curve, *others = map(texts, pictures(page))
    timeline, *_ = (each for each in others if {lane.name for lane in report.lanes} <= each)
    assert "1" in curve and "1" in timeline, "every fault has a mark"
    (scene,) = (each for each in others if "next step 500 ms" in each)
    assert "another in its place 100 ms" in scene
    curve, *others = map(texts, pictures(render(msgspec.structs.replace(report, faults=3 * report.faults))))
    timeline, *_ = (each for each in others if {lane.name for lane in report.lanes} <= each)
    assert {"1", "2", "3"} <= curve & timeline and sum("next step 500 ms" in each for each in others) == 3


@pytest.mark.thorough
@needs_chromium
def test_the_report_looks_right_in_a_browser(tmp_path: Path) -> None:
    write(reported(tmp_path / "run", a_run(1000)), tmp_path / "report.html")
    address = (tmp_path / "report.html").as_uri()
    for width, dark in ((1200, False), (1200, True), (500, False)):
        shot = np.asarray(screenshot(address, tmp_path, width, dark)[0]).astype(int)
        assert shot[2, 2].mean() < 50 if dark else shot[2, 2].mean() > 230
        assert len({tuple(pixel) for pixel in shot[::7, ::7].reshape(-1, 3)}) > 50, "there are pictures"
        margin = shot[:, -6:].reshape(-1, 3)
        assert abs(margin - margin[0]).max() < 5, "nothing runs over the right edge"


def test_without_jinja2_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(tmp_path, a_run())
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'holdfast[report]'")):
        render(report)


def test_a_batch_counts_as_all_of_its_updates(tmp_path: Path) -> None:
    """Its event names the first of them. Here the driver died before it could record the steps 4 and 5."""
    batches = [trained(step, 1.0 + step, updates=2) for step in range(0, 8, 2)]
    whole = reported(tmp_path / "whole", [*batches], steps=8)
    assert whole.good and whole.outcome == "all steps done" and whole.summary == "8 steps were committed."
    assert [point.steps for point in whole.learning.curve.rewards] == [2, 4, 6, 8]
    [lost] = (each for each in whole.figures if each.label == "Steps lost")
    assert (lost.value, lost.note) == ("0", "of 8 committed")
    [*some, last] = batches[:2] + batches[3:]
    died = ProcessLost(time=4.0, name="generator-0", role="generator", pid=12, how="was ended by SIGKILL")
    less = reported(tmp_path / "less", [*some, died, last], steps=8)
    assert not less.good and less.outcome == "6 of 8 steps done"
    [lost] = (each for each in less.figures if each.label == "Steps lost")
    assert (lost.value, lost.note) == ("2", "of 6 committed")
    assert [fault.step for fault in less.faults] == [4], "the steps that were committed before the loss"


def test_steps_after_the_state_that_a_driver_resumed_from_do_not_count_twice() -> None:
    before, after = (range(0, 10, 2), 1.0), (range(6, 12, 2), 11.0)
    first, again = ([trained(step, step + late, updates=2) for step in steps] for steps, late in (before, after))
    facts = RunFacts.of([*first, RunResumed(time=10.5, step=6), *again])
    assert sorted(facts.steps) == list(range(0, 12, 2)) and facts.repeated == 4
    assert facts.steps[6].time == 17.0


def used(time: float, seconds: float) -> ProcessorTime:
    return ProcessorTime(time=time, process="trainer-0", role="trainer", seconds=seconds)


def driver(time: float, wall: float) -> list[Event]:
    """A driver that starts at `time` on the run's axis and `wall` of the clock, and its trainer."""
    begun = ProcessStarted(time=time, name="driver", role="driver", pid=1, wall=wall)
    return [begun, ProcessStarted(time=time, name="trainer-0", role="trainer", pid=11)]


def test_the_time_between_two_drivers_is_a_part_of_the_run(tmp_path: Path) -> None:
    """The second one writes on from the last event of the first. The processes of the first ended with it."""
    events = [*driver(0.0, 1000.0), trained(0, 2.0), used(3.0, 9.0)]
    events += [*driver(3.0, 1010.0), RunResumed(time=3.0, step=1), used(4.0, 0.5), trained(1, 5.0), used(6.0, 2.5)]
    facts = RunFacts.of(events)
    assert (facts.downtime, facts.seconds, facts.steps[1].time) == (7.0, 13.0, 12.0)
    lanes = {each.name: (each.born, each.ended, each.fate, each.note) for each in facts.lanes()}
    assert lanes == {
        "driver": (0.0, 3.0, "lost", ""),
        "driver/2": (10.0, 13.0, "finished", ""),
        "trainer-0": (0.0, 3.0, "lost", "ended with its driver"),
        "trainer-0/2": (10.0, 13.0, "finished", ""),
    }
    assert [use.seconds for use in facts.processor_uses()] == [2.0], "each process has a clock of its own"
    report = reported(tmp_path, events)
    assert "resumed 1 time after 7 s without one, and 0 steps trained again" in report.summary
    assert [(each.value, each.note) for each in report.figures if each.label == "Downtime"] == [
        ("7 s", "without a driver, 54% of the run; 2 drivers")
    ]
    assert [(each.words, each.target, each.stages[0].seconds) for each in report.faults] == [
        ("driver lost", "driver", 7.0)
    ]
    assert "trainer-0/2" in render(report)


def test_a_clock_that_was_set_back_leaves_no_gap_between_drivers() -> None:
    facts = RunFacts.of([*driver(0.0, 1000.0), trained(0, 2.0), *driver(2.0, 900.0), trained(1, 3.0)])
    assert (facts.downtime, facts.seconds) == (0.0, 3.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_the_time_that_intervals_cover_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for begin, length in intervals for moment in range(begin, begin + length)}
    assert covered([(begin, begin + length) for begin, length in intervals]) == len(moments)


@pytest.mark.parametrize("events", [[], [trained(0, 1.0)]])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path, events: list[Event]) -> None:
    """Or ended before anything was drawn."""
    begun = ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=11)
    report = reported(tmp_path, [begun, *events])
    assert "<html" in render(report)
    nothing = msgspec.structs.replace(
        report, learning=Learning(curve=Curve((), ())), lanes=(), spans=(), faults=(), seconds=0.0
    )
    assert len(pictures(render(nothing))) == 2


def test_episodes_are_shown_escaped_with_reward_and_versions() -> None:
    prompt = Prompt(number=3, tokens=(1, 2), text="2 < 3 & <b>", answer="yes")
    drawn = {"logprobs": (-0.5, 0.0, -0.5), "versions": (4, 0, 5), "mask": (True, False, True)}
    shown = episode(prompt, (5, 7, 6), 0.25, parts={"format": 0.5}, **drawn)
    group = Group(number=9, prompt=prompt, episodes=(shown, shown))
    page = render_episodes("Episodes", episode_rows([group], lambda tokens: f"<i>{tokens}</i>"), omitted=2)
    assert "2 &lt; 3 &amp; &lt;b&gt;" in page and "<i>(5" not in page
    assert '<span class="said">&lt;i&gt;(7,)&lt;/i&gt;</span><span>&lt;i&gt;(6,)' in page, (
        "the environment's words are pale"
    )
    assert "4 to 5" in page and "format 0.50" in page and "2 older ones are left out" in page


def test_processor_time_is_that_of_the_steady_state() -> None:
    """The first 10 of 40 steps are left out, with the part of any work that lies in them."""

    def worked(what: str, time: float, seconds: float) -> Activity:
        return Activity(
            time=time, process="trainer-0", role="trainer", what=what, number=0, seconds=seconds, cpu=seconds
        )

    events: list[Event] = [ProcessStarted(time=0.0, name="trainer-0", role="trainer", pid=11)]
    events += [trained(step, 1.0 + step) for step in range(40)]
    events += [used(1.0, 50.0), used(11.0, 60.0), used(41.0, 80.0)]
    events += [worked("optimizer", 2.0, 3.0), worked("forward_backward", 9.0, 4.0), worked("generate", 20.0, 8.0)]
    events += [worked("all_reduce", 30.0, 1.0)]
    facts = RunFacts.of(events)
    [use] = facts.processor_uses()
    assert facts.steady_from == 10 and use.seconds == 20.0
    assert dict(use.work) == {"forward_backward": 2.0, "generate": 8.0, "all_reduce": 1.0} and use.other == 9.0
    assert facts.model_share() == 0.5
