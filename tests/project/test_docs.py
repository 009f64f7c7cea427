"""The documentation: snippets run, tables are complete, figures are drawn from their data, the site builds alone."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from holdfast import comms, ft, harness, store
from holdfast.rl.config.run_config import RunConfig
from support.browser import needs_chromium, screenshot, served
from support.programs.forked_programs import run_python
from support.programs.snippets import blocks, run_page, unmarked, wrong_excerpts
from support.source_tree import PACKAGES, ROOT, module_of, modules

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "figures"))
SITE = sorted(path for path in PAGES if path.parent != DOCS or path.name in ("index.md", "install.md", "quickstart.md"))
SITE.append(ROOT / "README.md")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUNNING = [
    pytest.param(page, id=name(page), marks=[pytest.mark.thorough] if "bash" in ran else [])
    for page in SITE
    if (ran := {block.language for block in blocks(page) if block.runs})
]
"""The pages with blocks that are run; those whose shell commands start jobs are in the second tier."""


@pytest.mark.timeout(400)  # a page trains a whole run
@pytest.mark.parametrize("page", RUNNING)
def test_every_snippet_runs(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_every_shell_snippet_says_whether_it_is_run_and_every_excerpt_is_in_its_file() -> None:
    assert not [line for page in SITE for line in (*unmarked(page), *wrong_excerpts(page))]


def test_files_that_pages_name_exist() -> None:
    """A path from a package on, as `ft/node/`, the name of a file alone, as `board.py`, and a page in the code."""
    names = {path.name for package in (*PACKAGES, "tests", "docs") for path in (ROOT / package).rglob("*.*")}
    missing = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        paths = re.findall(r"`((?:comms|backends|ft|store|rl|harness|tests|docs|examples)/[\w./*-]*)`", text)
        missing += [f"{name(page)}: {path}" for path in paths if not any(ROOT.glob(path.rstrip("/")))]
        for path, test in re.findall(r"pytest (?:-\w )*(tests/\S+\.py) -k (\w+)", text):
            missing += [] if test in (ROOT / path).read_text() else [f"{name(page)}: {path} -k {test}"]
        alone = re.findall(r"`(\w+\.(?:py|h|c))`", text) if page.is_relative_to(DOCS / "internals") else []
        missing += [f"{name(page)}: {each}" for each in alone if each not in names]
    for path in modules():
        pages = re.findall(r"docs/[\w/-]+\.md", (ROOT / path).read_text())
        missing += [f"{path}: {page}" for page in pages if not (ROOT / page).is_file()]
    start = (ROOT / "docs/index.md").read_text()
    guides = (ROOT / "docs/how-to").glob("*.md")
    missing += [f"the start table: {page.name}" for page in guides if f"(how-to/{page.name})" not in start]
    assert not missing


def test_a_page_that_the_code_fills_says_where_it_is_read() -> None:
    for page in (ROOT / "docs/reference").glob("*.md"):
        text = page.read_text()
        filled = "\n::: " in text or "<!-- generated" in text
        assert filled == (f"`.site/reference/{page.stem}.html`" in text), page.name


def test_the_reference_lists_every_environment_variable_event_metric_field_of_a_run_command_and_error() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'holdfast[docs]'")
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    generate = module_of("docs/reference/generate.py")
    first_columns = re.findall(r"^\| (`[^|]*) \|", (DOCS / "reference" / "environment.md").read_text(), re.M)
    listed = {word for row in first_columns for word in re.findall(r"`([^`]+)`", row)}
    assert listed == generate.environment_variables()
    config, errors, commands = generate.rl_config(), generate.errors(), generate.command_line()
    for table, rows in (
        (generate.events(), [f"| `{kind}` | " for kind in ("installed", "committed", "gap", "fault")]),
        (
            generate.metrics(),
            [
                "| `holdfast_epoch` | gauge |",
                "| `holdfast_steps_committed_total` | counter | `how` |",
                "| `holdfast_op_seconds` | histogram | `op` |",
            ],
        ),
        (
            config,
            [
                "| `seed` | whole number >= 0 | `0` | Decides the initial weights, the data order and all samples. |",
                "| `clip_low` | number > 0 < 1 | `0.2` | The ratio is clipped from below at 1 minus this. |",
                '| `mode` | `"synchronous"`, `"asynchronous"` | `"asynchronous"` |',
                "| `stop` | list of whole number | `[]` | Token numbers that end a completion. |",
                "## `[[reward]]`",
                '| `dr_grpo` | `scale_rewards = "none"`, `aggregate = "sum"` |',
            ],
        ),
    ):
        assert not [row for row in rows if row not in table]
    fields = [
        each for section in msgspec.structs.astuple(RunConfig()) for each in getattr(section, "__struct_fields__", ())
    ]
    assert all(f"`{each}`" in config for each in fields)
    public = [(each, getattr(module, each)) for module in (comms, store) for each in module.__all__]
    raised = [each for each, kind in public if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert all(f"{each}`" in errors for each in raised)
    names = "run, bench, chaos run, simulate, blame, top, gate, conformance, backends, store verify"
    assert all(f" holdfast {command}\n" in commands for command in names.split(", "))
    assert "[bold]" not in commands


# -- figures: drawn from the committed data, each exists, and a command repeats it

BENCHMARKS = DOCS / "benchmarks" / "index.md"
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
    shown = re.findall(r"!\[[^]]+\]\(\.\./figures/([^)]+)\)", BENCHMARKS.read_text())
    assert len(shown) >= 14
    for name in shown:
        assert (DOCS / "figures" / name).is_file(), f"{name} is not committed: make figures"
        assert (drawn / name).is_file() or name.startswith("simulate/"), f"nothing draws {name}"
    for name in re.findall(r"\]\(\.\./(figures/[^)]+)\)", BENCHMARKS.read_text()):
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


def commands_of(text: str) -> list[list[str]]:
    """The commands of this repository that a page names, as words."""
    found = re.findall(
        r"`(?:chrt -f \d+ |nice -n -?\d+ )?((?:holdfast|python|pytest|make) [^`]+)`", text.replace("\n", " ")
    )
    return [each.split() for each in found]


def test_each_target_and_file_of_the_page_exists() -> None:
    """`test_cli.py` checks the commands of `holdfast`."""
    targets, named = (ROOT / "Makefile").read_text(), commands_of(PERFORMANCE.read_text())
    assert len(named) > 30
    for words in named:
        if words[0] == "make":
            assert re.search(rf"(?m)^{re.escape(words[1])}:", targets), words
        elif words[0] != "holdfast":
            paths = [word for word in words if word.startswith(("docs/", "tests/"))]
            assert paths and all((ROOT / path).exists() for path in paths), words


def test_each_section_with_figures_names_a_command_that_repeats_them() -> None:
    sections = re.split(r"(?m)^## ", PERFORMANCE.read_text())[1:]
    without = [each.splitlines()[0] for each in sections if "\n|" in each and not commands_of(each)]
    assert not without, "name the command, or let the figures go"


# -- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'holdfast[docs]'")
    out = tmp_path_factory.mktemp("site")
    build = ("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out)
    run_python(*build, cwd=ROOT, environ=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return out


@pytest.mark.thorough
def test_the_site_builds_without_a_warning_and_has_every_public_name(site: Path) -> None:
    for package in (comms, ft, harness, store):
        short = package.__name__.rpartition(".")[2]
        page = (site / "reference" / f"{short}.html").read_text() + (site / "reference" / "errors.html").read_text()
        page += (site / "reference" / "timeouts.html").read_text()
        missing = [each for each in package.__all__ if not re.search(rf"\b{each}\b", page)]
        assert not missing, f"{short}.md lacks {missing}"


@pytest.mark.thorough
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """Links that a reader follows may lead anywhere; files that a browser loads by itself lie in the site."""
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:)?//|<link[^>]*rel=["']?(?:stylesheet|preconnect|icon)["']?[^>]*href=["']?(https?:)?//"""
    )
    wrong = [str(path.relative_to(site)) for path in site.rglob("*.html") if loads.search(path.read_text())]
    assert not wrong


@pytest.mark.thorough
@needs_chromium
@pytest.mark.parametrize(
    ("page", "dark"),
    [
        ("index", False),
        ("index", True),
        ("quickstart", True),
        ("reference/ft", False),
        ("concepts/ranks-views-epochs", True),
    ],
)
def test_a_browser_shows_the_page_in_light_and_dark_without_another_host(
    site: Path, page: str, dark: bool, tmp_path: Path
) -> None:
    with served(site) as address:
        shot, console = screenshot(f"{address}/{page}.html", tmp_path, 1300, dark)
    assert console == ""
    background = sum(shot.getpixel((600, 1590 if page != "index" else 120))) / 3  # type: ignore[arg-type]
    assert background < 80 if dark else background > 230
    colours = shot.resize((130, 160)).getcolors(130 * 160)
    assert colours is not None and len(colours) > 50, "text and styles are there"
