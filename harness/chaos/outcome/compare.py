"""Compares two runs of one scenario: which figures changed, and for the better or the worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.comms.errors import CorruptData
from holdfast.ft.console.units import format_seconds
from holdfast.harness.chaos.outcome.record import SCHEMA, ChaosReport, ChaosRun

TOLERANCE = 0.1
"""Relative changes up to this are called equal: single runs on a busy machine differ by more."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure of both runs, formatted; `direction` is about the second run."""

    name: str
    before: str
    after: str
    change: str
    direction: Literal["better", "worse", "equal", ""]


def load_report(path: Path) -> ChaosReport:
    """The report in a run.json, or in a folder that has one. Raises `CorruptData`, OSError."""
    file = path / "run.json" if path.is_dir() else path
    try:
        report = msgspec.json.decode(file.read_bytes(), type=ChaosReport)
    except msgspec.DecodeError as error:
        raise CorruptData(f"{file} is not a report of `holdfast chaos run`: {error}") from error
    if any(run.schema != SCHEMA for run in report.runs):
        raise CorruptData(f"{file} was written by another version of holdfast ({report.version})")
    return report


def compared(before: ChaosRun, after: ChaosRun) -> list[ComparedFigure]:
    """Every figure that both runs have."""
    rows = [
        _words("outcome", _outcome(before), _outcome(after), better=after.passed and not before.passed,
               worse=before.passed and not after.passed),
        _number("steps a second", before.speed.rate, after.speed.rate, "{:.1f}".format, higher=True),
    ]  # fmt: skip
    if before.goodput is not None and after.goodput is not None:
        rows.append(_number("goodput", before.goodput, after.goodput, "{:.1%}".format, higher=True))
    for stage in ("detected", "rebuilt", "resumed", "undisturbed"):
        if stage in before.percentiles and stage in after.percentiles:
            old, new = before.percentiles[stage], after.percentiles[stage]
            for field, name in (("p50", "median"), ("p90", "p90"), ("p99", "p99"), ("worst", "worst")):
                values = getattr(old, field), getattr(new, field)
                if None not in values:
                    rows += [_number(f"{stage} {name}", *values, format_seconds, higher=False)]
    rows.append(_words("rebuilds", str(before.rebuilds), str(after.rebuilds)))
    violations = [sum(len(finding.violations) for finding in run.findings) for run in (before, after)]
    rows.append(_words("violations", str(violations[0]), str(violations[1]), better=violations[1] < violations[0],
                       worse=violations[1] > violations[0]))  # fmt: skip
    rows.append(_words("final state", before.digest[:12], after.digest[:12]))
    return rows


def _outcome(run: ChaosRun) -> str:
    return "as expected" if run.passed else "not as expected"


def _words(name: str, before: str, after: str, *, better: bool = False, worse: bool = False) -> ComparedFigure:
    return ComparedFigure(
        name, before, after, "", "better" if better else "worse" if worse else "equal" if before == after else ""
    )


def _number(name: str, before: float, after: float, say: Callable[[float], str], *, higher: bool) -> ComparedFigure:
    if before <= 0:
        return ComparedFigure(name, say(before), say(after), "", "")
    change = after / before - 1
    if abs(change) <= TOLERANCE:
        return ComparedFigure(name, say(before), say(after), f"{change:+.0%}", "equal")
    return ComparedFigure(
        name, say(before), say(after), f"{change:+.0%}", "better" if (change > 0) == higher else "worse"
    )
