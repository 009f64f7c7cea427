"""Draws the pictures of docs/benchmarks/index.md from data: `python -m support.programs.figures FOLDER`.

`make figures-data` measures that data anew; `make figures` draws. A picture without data is reported as missing.
Pictures of simulations are drawn by `python docs/experiments/growth.py`, in a folder of their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.ft.console.units import counted
from holdfast.harness.bench.output import page, results
from holdfast.harness.bench.recovery.peer import PeerRecovery
from holdfast.harness.bench.recovery.recovery import RecoveryBench
from holdfast.harness.measure.show import show_time
from holdfast.harness.report.charts import PercentileBar, draw_bars
from holdfast.harness.report.plot import FONT

TIMELINE = "A timeline of every process of the run, with the faults"
"""The text alternative of the timeline in a chaos report."""


class Recoveries(msgspec.Struct, frozen=True):
    """The output of `holdfast bench recovery --peers --json`."""

    holdfast: RecoveryBench
    peer: PeerRecovery


def _collectives(folder: Path) -> Iterator[tuple[str, str]]:
    """Bus bandwidth of each op, and the time of small all_reduces."""
    for path in sorted((folder / "bench").glob("*.json")):
        bench = results.load(path)
        draw = page.times if path.stem == "small" else page.bandwidths
        for name, chart in draw(bench):
            yield f"bench-{name}", chart.svg(name, standalone=True)


def _recovery(folder: Path) -> Iterator[tuple[str, str]]:
    path = folder / "recovery.json"
    if not path.is_file():
        raise FileNotFoundError(path)
    found = msgspec.json.decode(path.read_bytes(), type=Recoveries)
    ours, theirs = found.holdfast, found.peer
    bars = [
        PercentileBar(f"holdfast over {ours.backend}", ours.total.median, ours.total.p90, ours.total.p99, 0),
        PercentileBar(theirs.library, theirs.total.median, theirs.total.p90, theirs.total.p99, 1),
    ]
    kills = counted(len(ours.kills), "kill")
    heading = f"SIGKILL of 1 of {ours.ranks} ranks in an all_reduce, to the survivors' next: {kills} each"
    chart = draw_bars(heading, bars, lambda milliseconds: show_time(1e3 * milliseconds))
    yield "recovery", chart.svg(heading, standalone=True)


def _chaos(folder: Path) -> Iterator[tuple[str, str]]:
    """The timeline of a chaos report, with the style of its page."""
    report = (folder / "chaos" / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", report, re.DOTALL)
    for drawing in re.findall(r'<div class="chart">\s*(<svg.*?</svg>)', report, re.DOTALL):
        if f'aria-label="{TIMELINE}"' in drawing and style is not None:
            start = drawing.index(">") + 1
            ground = '<rect width="100%" height="100%" rx="14" style="fill: var(--panel)"/>'
            yield "chaos-timeline", f"{drawing[:start]}<style>{style[1]}{FONT}</style>{ground}{drawing[start:]}"
            return
    raise ValueError(f"there is no timeline in {folder / 'chaos' / 'report.html'}")


SOURCES: tuple[Callable[[Path], Iterator[tuple[str, str]]], ...] = (_collectives, _recovery, _chaos)


def draw(folder: Path) -> tuple[list[Path], list[str]]:
    """Draw a picture beside each data file; returns the pictures, and messages on what is missing."""
    drawn, missing = [], []
    for source in SOURCES:
        try:
            for name, picture in source(folder):
                path = folder / f"{name}.svg"
                path.write_text(picture + "\n", encoding="utf-8")
                drawn.append(path)
        except FileNotFoundError as error:
            missing.append(f"no {error.filename or error}")
    return drawn, missing


if __name__ == "__main__":
    made, absent = draw(Path(sys.argv[1]))
    for each in made:
        print(each)
    for words in absent:
        print(f"missing: {words}; make figures-data", file=sys.stderr)
    sys.exit(1 if absent else 0)
