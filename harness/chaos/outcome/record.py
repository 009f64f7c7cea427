"""The data of a finished run, for tables, reports, comparisons and other programs.

All times are seconds since the run began; durations are seconds.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import msgspec

from holdfast.ft.console.units import counted
from holdfast.harness.invariants import CheckResult
from holdfast.harness.links.policy import LinkTraffic
from holdfast.harness.report.model import FaultRecord, Learning, ProcessRecord, Span
from holdfast.harness.training.episodes_page import GroupRows

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
        """The faults whose moment came."""
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
