"""The data of a finished run, for tables, reports and other programs, and the comparison of two runs.

All times are seconds since the run began; durations are seconds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.comms.errors import UNDECODABLE, CorruptData
from holdfast.ft.console.units import counted, format_seconds
from holdfast.harness.invariants import CheckResult
from holdfast.harness.links.policy import LinkTraffic
from holdfast.harness.report.model import FaultRecord, Learning, ProcessRecord, Span
from holdfast.harness.training.report import GroupRows

SCHEMA = 1


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of one stage in seconds, over the `count` faults that have it.

    `p50` is the median. A few values have no percentiles: then p90 and p99 are None, and `values` are all of them.
    """

    count: int
    p50: float
    p90: float | None
    p99: float | None
    worst: float
    values: tuple[float, ...] = ()


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Committed steps, and how many a second from the first to the last."""

    steps: int
    rate: float


class HostLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What followed the loss of a host in a run of reinforcement learning, in seconds since then.

    `processes` were on it. `step`: the next step was committed, in a new epoch. `answer`: the next call to a generator
    was answered. `calls` that the lost processes had were answered by others, the last of them after `calls_answered`.
    `copies`: each version of the weights had all of its copies again. None: it did not happen.
    """

    processes: tuple[str, ...]
    step: float | None
    answer: float | None
    calls: int
    calls_answered: float | None
    copies: float | None


class ChaosRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one scenario. `failures` are the differences from the expected outcome."""

    schema: int = SCHEMA
    name: str
    title: str
    summary: str
    source: str
    seed: int
    began: str
    seconds: float
    workload: str
    backend: str
    expected: str
    passed: bool
    failures: tuple[str, ...]
    violated: tuple[str, ...]
    strikes: tuple[FaultRecord, ...]
    lives: tuple[ProcessRecord, ...]
    spans: tuple[Span, ...]
    findings: tuple[CheckResult, ...]
    percentiles: dict[str, Percentiles]
    speed: Speed
    reference: Speed | None
    digest: str
    reference_digest: str
    rebuilds: int
    ranks: int
    unchecked: str = ""
    """Why what the ranks returned was compared with nothing; empty if it was compared."""
    progress: tuple[tuple[float, int], ...] = ()
    """How many steps were committed at which time."""
    links: tuple[LinkTraffic, ...] = ()
    learning: Learning | None = None
    """Of a run of reinforcement learning."""
    episodes: tuple[GroupRows, ...] = ()
    """The newest episodes of such a run, in words."""
    host_losses: tuple[HostLoss, ...] = ()
    configuration: dict[str, str] = {}
    repeat: str = ""
    output: str = ""

    @property
    def injected(self) -> tuple[FaultRecord, ...]:
        """The faults that were injected."""
        return tuple(fault for fault in self.strikes if fault.time is not None)

    @property
    def goodput(self) -> float | None:
        """Steps a second as a share of those of a run without faults; None without such a run."""
        if self.reference is None or self.reference.rate <= 0:
            return None
        return self.speed.rate / self.reference.rate


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json, as `holdfast chaos run` writes it."""

    version: str
    machine: str
    runs: tuple[ChaosRun, ...]

    @staticmethod
    def of(*runs: ChaosRun) -> ChaosReport:
        """The report of runs on this machine."""
        cores, system = len(os.sched_getaffinity(0)), f"{platform.system()} {platform.release()}"
        machine = f"{counted(cores, 'core')}, {system}, Python {platform.python_version()}, torch {version('torch')}"
        return ChaosReport(version=version("holdfast"), machine=machine, runs=runs)

    @property
    def passed(self) -> bool:
        return all(run.passed for run in self.runs)


# Two runs side by side ------------------------------------------------------------------------------------------------


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
    except UNDECODABLE as error:
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
