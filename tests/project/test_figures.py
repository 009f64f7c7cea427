"""The page of figures: drawn from the committed data, and every figure that it shows exists."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.harness.bench import figures
from support.source_tree import ROOT

DOCS = ROOT / "docs"
PAGE = DOCS / "benchmarks" / "index.md"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the data, with the pictures drawn anew."""
    folder = tmp_path_factory.mktemp("figures") / "figures"
    shutil.copytree(DOCS / "figures", folder, ignore=shutil.ignore_patterns("*.svg"))
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


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    made, missing = figures.draw(tmp_path)
    assert made == []
    assert any("recovery.json" in words for words in missing)
    assert any("report.html" in words for words in missing)
