"""The asv suite: counts, ranks that stay alive, and the published pages of a run in a browser."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from benchmarks import pages
from benchmarks.collectives import bytecodes
from benchmarks.common import RankClock, Ranks, RankTimes
from benchmarks.one_sided import Atomics
from holdfast import comms
from support.browser import dom, needs_chromium, served
from support.programs.forked_programs import run_python
from support.source_tree import ROOT

CHOSEN = r"Bookkeeping|Atomics\.time_op\(.*signal"


def test_bytecodes_are_the_same_every_time() -> None:
    tensor = torch.ones(2)
    with comms.connect("inproc", rank=0, size=1, rendezvous=dist.HashStore(), timeout=60.0) as comm:
        fast = {bytecodes(lambda: comm.all_reduce(tensor)) for _ in range(3)}
        long_way = {bytecodes(lambda: comm.all_reduce(tensor, timeout=30.0)) for _ in range(3)}
    assert len(fast) == len(long_way) == 1
    assert 5 < fast.pop() < 100 < long_way.pop() < 20_000


# Ranks that stay alive -------------------------------------------------------------------------------------------


def test_ranks_are_started_once_and_the_clock_shows_what_they_measured() -> None:
    ranks, clock = Ranks(), RankClock()
    try:
        group = ranks.group("holdfast:inproc", 2)
        began = clock()
        clock.advance(ranks.seconds("holdfast:inproc", "all_reduce", 2, 1024, 5))
        assert 0 < clock() - began < 5
        assert ranks.group("holdfast:inproc", 2) is group
    finally:
        ranks.close()


def test_asv_skips_benchmarks_that_cannot_run_here_and_passes_over_their_base() -> None:
    """It would run each class with a `time_` method that a module has, but takes no abstract ones."""
    with pytest.raises(NotImplementedError, match="nosuch"):
        Ranks().group("holdfast:nosuch", 2)
    assert inspect.isabstract(RankTimes)
    assert not inspect.isabstract(Atomics)


# The pages -------------------------------------------------------------------------------------------------------


def test_files_that_pages_load_are_put_beside_them(tmp_path: Path) -> None:
    page = '<script src="https://a.b/jquery-3.3.1.min.js" integrity="sha256-x" onerror="f()"></script>'
    local = pages.localise(page, tmp_path / "vendor")
    assert local == '<script src="vendor/jquery.min.js" onerror="f()"></script>'
    assert (tmp_path / "vendor" / "jquery.min.js").stat().st_size > 80_000
    with pytest.raises(pages.NotVendored, match="unheard-of"):
        pages.localise('<script src="https://a.b/unheard-of.js"></script>', tmp_path / "vendor")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of a real run of two benchmarks, one of them by ranks."""
    folder = tmp_path_factory.mktemp("asv")
    configuration = json.loads((ROOT / "asv.conf.json").read_text())
    configuration |= {"repo": str(ROOT), "benchmark_dir": str(ROOT / "tests" / "benchmarks")}
    configuration |= {name: str(folder / name) for name in ("env_dir", "results_dir", "html_dir")}
    (folder / "asv.conf.json").write_text(json.dumps(configuration))
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True).strip()
    environment = os.environ | {"HOME": str(folder), "HOLDFAST_ASV": "quick"}

    def asv(*arguments: str) -> None:
        run_python("-m", "asv", *arguments, "--config", folder / "asv.conf.json", cwd=folder, environ=environment)

    asv("machine", "--yes")
    here = f"existing:{sys.executable}"
    asv("run", "--environment", here, "--set-commit-hash", commit, "--quick", "--show-stderr", "--bench", CHOSEN)
    asv("publish", "--no-pull")
    pages.make_local(folder / "html_dir")
    return folder / "html_dir"


@pytest.mark.thorough
def test_a_run_has_figures_and_leaves_no_rank_behind(published: Path) -> None:
    names = set(json.loads((published / "index.json").read_text())["benchmarks"])
    assert {"rl.Bookkeeping.time_batches", "one_sided.Atomics.time_op"} <= names
    every = psutil.process_iter(["environ"])
    left = [each.pid for each in every if (each.info["environ"] or {}).get("HOME") == str(published.parent)]
    assert left == [], "processes with the environment of the run"


@pytest.mark.thorough
@needs_chromium
def test_the_published_pages_open_in_a_browser_without_a_network(published: Path, tmp_path: Path) -> None:
    assert "://" not in (published / "index.html").read_text().split("<body", 1)[0].replace("http://www.w3.org", "")
    with served(published) as address:
        shown = dom(f"{address}/#summarylist", tmp_path, "--virtual-time-budget=8000")
    assert "time_batches" in shown, "the table of all benchmarks"
    assert "signal" in shown
    assert "failed to load" not in shown.lower()
