"""The pages of figures: drawn from the committed data, every figure exists, and a command repeats it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.source_tree import ROOT, module_of

DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks" / "index.md"
figures = module_of("docs/figures/draw.py")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the data, with the pictures drawn anew."""
    folder = tmp_path_factory.mktemp("figures") / "figures"
    shutil.copytree(DOCS / "figures", folder, ignore=shutil.ignore_patterns("*.svg", "*.py"))
    made, missing = figures.draw(folder)
    assert made
    assert missing == []
    return folder


def test_figures_on_the_page_exist_and_are_drawn_from_the_data(drawn: Path) -> None:
    shown = re.findall(r"!\[[^]]+\]\(\.\./figures/([^)]+)\)", PAGE.read_text())
    assert len(shown) >= 14
    for name in shown:
        assert (DOCS / "figures" / name).is_file(), f"{name} is not committed: make figures"
        assert (drawn / name).is_file() or name.startswith("simulate/"), f"nothing draws {name}"
    for name in re.findall(r"\]\(\.\./(figures/[^)]+)\)", PAGE.read_text()):
        assert (DOCS / name).exists()


def test_pictures_are_whole_and_self_contained(drawn: Path) -> None:
    for path in drawn.glob("*.svg"):
        text = path.read_text()
        ElementTree.fromstring(text)
        assert "url(http" not in text
        assert "<script" not in text


def test_bars_are_drawn_to_their_percentiles() -> None:
    bars = [figures.PercentileBar("ours", 5.0, 8.0, 10.0, 0), figures.PercentileBar("theirs", 20.0, 30.0, 40.0, 1)]
    chart = figures.draw_bars("recovery", bars, lambda value: f"{value:g} ms")
    assert [round(patch.get_width()) for patch in chart.axes.patches] == [10, 8, 5, 40, 30, 20]
    drawing = ElementTree.fromstring(chart.svg("recovery", standalone=True))
    assert {each.text for each in drawing.iter() if each.tag.endswith("title")} >= {
        "ours: median 5 ms, p90 8 ms, p99 10 ms",
        "theirs: median 20 ms, p90 30 ms, p99 40 ms",
    }


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    made, missing = figures.draw(tmp_path)
    assert made == []
    assert any("recovery.json" in words for words in missing)
    assert any("report.html" in words for words in missing)


PERFORMANCE = DOCS / "performance.md"


def commands(text: str) -> list[list[str]]:
    """The commands of this repository that a page names, as words."""
    found = re.findall(
        r"`(?:chrt -f \d+ |nice -n -?\d+ )?((?:holdfast|python|pytest|make) [^`]+)`", text.replace("\n", " ")
    )
    return [each.split() for each in found]


def what_is_wrong(words: list[str]) -> str:
    """Why a target or a file does not exist; "" if it does. `test_cli.py` checks the commands of `holdfast`."""
    if words[0] == "make":
        known = (ROOT / "Makefile").read_text()
        return "" if re.search(rf"(?m)^{re.escape(words[1])}:", known) else "no such target"
    if words[0] in ("python", "pytest"):
        paths = [word for word in words if word.startswith(("docs/", "tests/"))]
        return "" if paths and all((ROOT / path).exists() for path in paths) else "no such file"
    return ""


def test_each_target_and_file_of_the_page_exists() -> None:
    named = commands(PERFORMANCE.read_text())
    assert len(named) > 30
    wrong = {" ".join(words): why for words in named if (why := what_is_wrong(words))}
    assert not wrong


def test_each_section_with_figures_names_a_command_that_repeats_them() -> None:
    sections = re.split(r"(?m)^## ", PERFORMANCE.read_text())[1:]
    without = [each.splitlines()[0] for each in sections if "\n|" in each and not commands(each)]
    assert not without, "name the command, or let the figures go"
