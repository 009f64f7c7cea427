"""The output of a bench: its page with the roofline, standalone pictures."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.ft.console.console import console
from holdfast.harness.bench.command import app
from holdfast.harness.bench.output import page, show
from holdfast.harness.bench.output.results import Bench, BenchRow, OpFailure, ratios
from holdfast.harness.measure.results import Machine
from holdfast.harness.measure.stats import Timing
from holdfast.harness.report import charts
from holdfast.harness.report.plot import Chart
from support.programs.figures import PercentileBar, draw_bars

MACHINE = Machine("a processor", 2, "6.1", "3.11", "2.13", 0.05)
NAMES = ("holdfast:shm", "openmpi", "memcpy")


def row(op: str, ranks: int, contestant: str, nbytes: int, microseconds: float) -> BenchRow:
    timing = Timing.of([microseconds / 1e6] * 3, 1)
    bandwidth = nbytes / microseconds / 1e3
    return BenchRow(
        op=op, ranks=ranks, contestant=contestant, nbytes=nbytes, dtype="float32", timing=timing, single=timing,
        turns=(microseconds,) * 3, algbw=bandwidth, busbw=bandwidth, wrong=0,
    )  # fmt: skip


def bench(slower: float = 1.0, ranks: Sequence[int] = (2, 4), failures: tuple[OpFailure, ...] = ()) -> Bench:
    """Two sizes of all_reduce by three contestants."""
    rows = [
        row("all_reduce", number, name, size, slower * (3 + size / 9000) * (1 + index) * number)
        for number in ranks
        for size in (8, 1 << 20)
        for index, name in enumerate(NAMES)
    ]
    rows.append(row("barrier", ranks[0], NAMES[0], 0, slower * 5.0))
    return Bench(
        command="holdfast bench all_reduce", machine=MACHINE, contestants={"shm": "x"}, skipped={}, rows=tuple(rows),
        ratios=ratios(rows, NAMES[:1]), failures=failures,
    )  # fmt: skip


# The page --------------------------------------------------------------------------------------------------------


def test_the_page_has_charts_with_the_roofline_and_is_self_contained() -> None:
    text = page.render(bench(), when="today")
    assert set(re.findall(r"""https?://[^"'\s<]+""", text)) <= {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    drawn = [ElementTree.fromstring(found) for found in re.findall(r'<div class="chart"[^>]*>(<svg.*?</svg>)', text)]
    assert len(drawn) == 2 + 2 + 2, "bandwidth and time for 2 and 4 ranks, time over ranks for two sizes"
    assert text.count('class="roof"') == 2, "where there is bandwidth there is the roofline"
    assert "✓ all results right" in text
    assert "1 MiB" in text


def test_a_failure_of_ours_is_shown_at_the_top_and_is_not_well() -> None:
    broken = OpFailure(op="all_reduce", ranks=2, contestant="holdfast:shm", nbytes=8, reason="it <broke>")
    text = page.render(bench(failures=(broken,)))
    assert "✗ not all is well" in text
    assert "it &lt;broke&gt;" in text


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg("a chart", standalone=True))


def tips(drawing: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in drawing.iter() if each.tag.endswith("title")]


def test_lines_of_a_chart_stay_inside_and_their_names_apart() -> None:
    series = [
        charts.Series(f"number {index}", ((8.0, 1e-3 * (index + 1)), (1e6, 50.0 + index / 100)), index)
        for index in range(6)
    ]
    drawing = drawn(charts.draw_lines("many", series, str, str, "GB/s"))
    names = [each for each in drawing.iter() if (each.text or "").startswith("number") and each.tag.endswith("text")]
    heights = sorted(float(each.get("y", "nan")) for each in names)
    assert len(heights) == 6
    assert all(below - above >= charts.LABEL_GAP - 0.1 for above, below in itertools.pairwise(heights))
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    dots = [each for each in drawing.iter() if each.tag.endswith("use")]
    assert all(0 < float(dot.get("x", 0)) < width and 0 < float(dot.get("y", 0)) < height for dot in dots)
    assert "number 3, 8.0: 0.004" in tips(drawing)
    with pytest.raises(ValueError, match="nothing to draw"):
        charts.draw_lines("none", [], str, str, "")


def test_bars_are_drawn_to_their_percentiles() -> None:
    bars = [PercentileBar("ours", 5.0, 8.0, 10.0, 0), PercentileBar("theirs", 20.0, 30.0, 40.0, 1)]
    chart = draw_bars("recovery", bars, lambda value: f"{value:g} ms")
    assert [round(patch.get_width()) for patch in chart.axes.patches] == [10, 8, 5, 40, 30, 20]  # type: ignore[attr-defined]
    assert set(tips(drawn(chart))) == {
        "ours: median 5 ms, p90 8 ms, p99 10 ms",
        "theirs: median 20 ms, p90 30 ms, p99 40 ms",
    }


def test_a_chart_takes_the_colours_of_its_page_and_alone_it_brings_them() -> None:
    chart = charts.draw_lines("one", [charts.Series("a", ((1.0, 1.0), (2.0, 3.0)), 0)], str, str, "y")
    inside = chart.svg("one")
    assert "var(--s0)" in inside and not re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", inside)
    assert "<style" not in inside and "prefers-color-scheme: dark" in chart.svg("one", standalone=True)


def test_names_of_pictures_say_what_they_show() -> None:
    assert [name for name, _ in page.bandwidths(bench())] == ["all_reduce-2", "all_reduce-4"]
    assert [name for name, _ in page.sweeps(bench())] == ["all_reduce-8-ranks", "all_reduce-1048576-ranks"]


@pytest.mark.parametrize("columns", [60, 80])
def test_the_tables_of_a_bench_fit_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    out = console()
    show.show(bench(), out)
    lines = stream.getvalue().splitlines()
    assert not any(line.startswith(("p50: ", "size: 8", "library: ", "now: ")) for line in lines), "a line a figure"
    assert "not shown at this width: " in stream.getvalue()
    assert sum("all_reduce" in line for line in lines) == 2
    assert max(map(len, (line for line in lines if line[:1] in "\u2502\u2503"))) <= columns


def test_the_command_writes_the_report_and_its_data(tmp_path: Path) -> None:
    asked = ["copy", "-n", "1:2", "--sizes", "8,1K", "--seconds", "0.02", "--rounds", "2", "--report", str(tmp_path)]
    first = CliRunner().invoke(app, asked)
    assert first.exit_code == 0, first.output
    assert "1 KiB" in first.stdout and "#wrong" in first.stdout
    assert "Pictures" in (tmp_path / "report.html").read_text()
    assert msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Bench).wrong == 0
