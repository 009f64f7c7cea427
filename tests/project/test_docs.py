"""The documentation: snippets run, tables are complete, the site builds without a warning or the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import comms, ft, harness, store
from holdfast.rl.config.run_config import RunConfig
from support.browser import needs_chromium, screenshot, served
from support.programs.snippets import blocks, run_page, unmarked, wrong_excerpts
from support.source_tree import PACKAGES, ROOT, module_of, modules

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "figures"))
SITE = sorted(path for path in PAGES if path.parent != DOCS or path.name in ("index.md", "install.md", "quickstart.md"))
SITE.append(ROOT / "README.md")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def languages(page: Path) -> set[str]:
    """The languages of the blocks that are run."""
    return {block.language for block in blocks(page) if block.runs}


RUNNING = [
    pytest.param(page, id=name(page), marks=[pytest.mark.thorough] if "bash" in ran else [])
    for page in SITE
    if (ran := languages(page))
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


@pytest.fixture(scope="module")
def generate() -> Any:
    """The module that generates the tables of the reference."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'holdfast[docs]'")
    return module_of("docs/reference/generate.py")


def listed(page: str) -> set[str]:
    """The names in the first columns of a page's tables."""
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "reference" / page).read_text(), re.M)
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def test_the_reference_lists_every_environment_variable_event_metric_field_of_a_run_command_and_error(
    generate: Any,
) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'holdfast[metrics]'")
    assert listed("environment.md") == generate.environment_variables()
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'holdfast[docs]'")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The URL of a server of the site on loopback."""
    with served(site) as url:
        yield url


@pytest.mark.thorough
@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", ["index", "quickstart", "reference/ft", "concepts/ranks-views-epochs"])
def test_a_browser_shows_the_page_in_light_and_dark_without_another_host(
    address: str, page: str, dark: bool, tmp_path: Path
) -> None:
    shot, console = screenshot(f"{address}/{page}.html", tmp_path, 1300, dark)
    assert console == ""
    background = sum(shot.getpixel((600, 1590 if page != "index" else 120))) / 3  # type: ignore[arg-type]
    assert background < 80 if dark else background > 230
    colours = shot.resize((130, 160)).getcolors(130 * 160)
    assert colours is not None and len(colours) > 50, "text and styles are there"
