"""Runs whole scenarios: the run without faults, the run with them, and the record of both."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from holdfast.comms.errors import HoldfastError
from holdfast.ft.event_lines import merge
from holdfast.ft.events import StepBegun, StepCommitted
from holdfast.harness.chaos.outcome import checks, measure, training
from holdfast.harness.chaos.outcome.record import ChaosReport, ChaosRun, Speed
from holdfast.harness.chaos.outcome.training import host_losses
from holdfast.harness.chaos.run.scenario_run import KILLED, QUIET, RawRun, RunCallbacks, ScenarioRun
from holdfast.harness.chaos.run.session_processes import BODIES, digest_of
from holdfast.harness.chaos.run.store_processes import weights
from holdfast.harness.chaos.scenario import JobSpec, Scenario, schedule
from holdfast.harness.chaos.workload import AllReduce, ReinforcementLearning, StoreWorkload
from holdfast.harness.invariants import CHECKERS, Bounds, CheckResult, examine
from holdfast.harness.links.policy import LinkTraffic
from holdfast.harness.report.model import Learning, ProcessRecord
from holdfast.harness.training.report import GroupRows

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of a run without faults. `digest` is "" if unknown; `values` are the results of ranks."""

    speed: Speed
    digest: str
    values: Mapping[str, Any]


class ChaosFailed(AssertionError):
    """A run had another outcome than expected. The text says why, and how to repeat the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """A run under chaos. `values` are the results of the ranks of the last view, by rank; `report` has every figure."""

    report: ChaosRun
    values: tuple[Any, ...]

    @property
    def passed(self) -> bool:
        """Whether the outcome is the expected one."""
        return self.report.passed

    @property
    def failures(self) -> tuple[str, ...]:
        """The reasons why the outcome is not the expected one, in words."""
        return self.report.failures

    def check(self) -> Result:
        """Return this result if it is as expected. Raises `ChaosFailed` with every reason if not."""
        if not self.passed:
            lines = [f"{self.report.title}: not as expected", *(f"  - {failure}" for failure in self.failures)]
            struck = [f"  {each.number}. {each.when}: {each.words}" for each in self.report.strikes]
            lines += ["faults:", *struck, f"repeat: {self.report.repeat}" if self.report.repeat else ""]
            raise ChaosFailed("\n".join(filter(None, lines)))
        return self

    def write(self, folder: Path | str) -> Path:
        """Write report.html and run.json into a folder; returns the path of the page."""
        from holdfast.harness.chaos.outcome.show import write_folder

        write_folder(ChaosReport.of(self.report), Path(folder))
        return Path(folder) / "report.html"


class WorkloadFailed(HoldfastError, RuntimeError):
    """The workload fails without any fault, so there is nothing to compare with."""


class ScenarioRunner:
    """Runs scenarios one after the other, and reuses fault-free runs of equal workload and job."""

    def __init__(self, callbacks: RunCallbacks = QUIET) -> None:
        self._callbacks = callbacks
        self._references: dict[bytes, Reference] = {}

    def run(
        self,
        scenario: Scenario,
        seed: int,
        *,
        source: str = "",
        minutes: float | None = None,
        compare: bool = True,
        body: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        repeat: str = "",
    ) -> Result:
        """Run the scenario with the faults that `seed` draws.

        `minutes`: the length, at the speed of a run without faults. `compare`: run it without faults, too.
        `body(session, *args)` replaces the workload's own.
        """
        began = datetime.now().astimezone().isoformat(timespec="seconds")
        minutes = scenario.minutes if minutes is None else minutes
        sample: Reference | None = None
        if minutes is not None:
            sample = self._reference(_shortened(scenario), body, args, "measuring the speed")
            rate = max(sample.speed.rate, 0.1)
            scenario = _with_steps(scenario, max(10, round(60 * minutes * rate)), 120 * minutes + 120)
        seconds = None if minutes is None else 60 * minutes
        planned = schedule(scenario, seed, seconds=seconds)
        reference = sample
        if compare and minutes is None:
            reference = self._reference(scenario, body, args, "without faults")
        elif compare and scenario.expect.weights == "identical":
            assert sample is not None
            bits = self._reference(_fast(scenario), body, args, "without faults or pauses")
            reference = replace(sample, digest=bits.digest)
        raw = self._run(scenario, planned, body, args, seed, "with faults")
        return _outcome(scenario, seed, source, began, raw, reference, repeat)

    def _reference(
        self, scenario: Scenario, body: Callable[..., Any] | None, args: Sequence[Any], phase: str
    ) -> Reference:
        key = msgspec.json.encode((scenario.workload, scenario.job)) + repr((body, args)).encode()
        if key not in self._references:
            raw = self._run(msgspec.structs.replace(scenario, faults=()), (), body, args, 0, phase)
            if raw.results.errors:
                raise WorkloadFailed(f"without any fault {_in_a_line(raw)}")
            digests = _digests(scenario, raw)
            digest = next(iter(digests.values()), "")
            self._references[key] = Reference(measure.speed(raw.events), digest, raw.results.values)
        return self._references[key]

    def _run(
        self,
        scenario: Scenario,
        planned: Any,
        body: Callable[..., Any] | None,
        args: Sequence[Any],
        seed: int,
        phase: str,
    ) -> RawRun:
        steps = scenario.workload.steps or 0
        if body is None and scenario.workload.family == "session":
            body, args = BODIES[type(scenario.workload)], (scenario.workload, steps)
        with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as directory:
            scenario_run = ScenarioRun(
                scenario,
                planned,
                Path(directory),
                body=body,
                args=args,
                steps=steps,
                seed=seed,
                callbacks=replace(self._callbacks, phase=phase),
            )
            return scenario_run.run()


def _with_steps(scenario: Scenario, steps: int, limit: float) -> Scenario:
    workload = scenario.workload.with_steps(steps)
    return msgspec.structs.replace(scenario, workload=workload, limit=max(limit, scenario.limit))


def _shortened(scenario: Scenario) -> Scenario:
    """The scenario cut to the steps that measure its speed."""
    return _with_steps(scenario, scenario.workload.sample_steps, scenario.limit)


def _fast(scenario: Scenario) -> Scenario:
    """The same steps without pauses on one rank.

    The bits of the result do not depend on the number of ranks.
    """
    job = JobSpec(backend="shm", ranks=1, shards=scenario.job.shards or scenario.job.ranks)
    workload = scenario.workload
    if isinstance(workload, AllReduce):
        workload = msgspec.structs.replace(workload, pause=0.0)
    return msgspec.structs.replace(scenario, workload=workload, job=job)


def _digests(scenario: Scenario, raw: RawRun) -> dict[str, str]:
    """What every process returned, as checksums; nothing if they are not compared. Raises `NoDigest`.

    A process that returned nothing has none.
    """
    if scenario.expect.weights == "unchecked":
        return {}
    if scenario.workload.family in ("store", "rl"):
        return {name: value["digest"] for name, value in raw.results.values.items() if "digest" in value}
    return {name: digest_of(value) for name, value in raw.results.values.items() if value is not None}


def _outcome(
    scenario: Scenario, seed: int, source: str, began: str, raw: RawRun, reference: Reference | None, repeat: str
) -> Result:
    bounds = Bounds(operation=scenario.job.timeouts.operation + 5.0, progress=scenario.expect.progress)
    findings = _findings(raw, bounds)
    if raw.training is not None:
        moments = [fault.time for fault in raw.faults if fault.time is not None]
        findings += training.examine(raw.training, moments, scenario.expect.progress)
    digests = _digests(scenario, raw)
    wanted = ""
    if scenario.expect.weights == "identical":
        if isinstance(scenario.workload, StoreWorkload):
            wanted = digest_of(weights(scenario.workload, scenario.workload.versions))
        elif reference is not None:
            wanted = reference.digest
    if scenario.expect.weights != "unchecked":
        findings.append(checks.same_weights(digests, wanted))
    if scenario.expect.leaks:
        findings.append(checks.growth(raw.events))
    faults, speed, rebuilds = measure.injected_faults(raw), measure.speed(raw.events), measure.rebuilds(raw.events)
    compared = reference.speed if reference is not None else None
    found = checks.failures(scenario, raw, findings, faults, speed, compared, rebuilds)
    lives = _lives(raw)
    names = {life.pid: life.name for life in lives}
    spans = measure.spans(raw, names)
    learning: Learning | None = None
    episodes: tuple[GroupRows, ...] = ()
    if raw.training is not None:
        facts = training.facts_of(raw.training, raw.began)
        spans, learning, episodes = (*spans, *facts.spans()), facts.learning(), training.episodes_of(raw.training)
    run = ChaosRun(
        name=scenario.name,
        title=scenario.title,
        summary=scenario.summary.strip(),
        source=source,
        seed=seed,
        began=began,
        seconds=raw.ended - raw.began,
        workload=str(type(scenario.workload).__struct_config__.tag),
        backend=_backend(scenario),
        expected=scenario.expect.verdict,
        passed=not found,
        failures=tuple(found),
        violated=checks.violated(findings),
        strikes=faults,
        lives=lives,
        spans=measure.thinned(spans, faults, raw.ended - raw.began),
        progress=measure.progress(raw),
        findings=tuple(findings),
        percentiles=measure.percentiles(faults),
        speed=speed,
        reference=compared,
        digest=next(iter(digests.values()), ""),
        reference_digest=wanted,
        rebuilds=rebuilds,
        ranks=raw.results.ranks,
        unchecked=_unchecked(scenario, digests, findings),
        links=_links(raw, names),
        learning=learning,
        episodes=episodes,
        host_losses=() if raw.training is None else host_losses(raw.training, raw.faults),
        configuration=_configuration(scenario),
        repeat=repeat,
        output=raw.output[-20000:] if found else "",
    )
    return Result(run, tuple(raw.results.values.values()))


def _unchecked(scenario: Scenario, digests: Mapping[str, str], findings: Sequence[CheckResult]) -> str:
    """Why what the ranks returned was compared with nothing; empty if it was compared."""
    if scenario.expect.weights == "unchecked":
        return 'expect.weights = "unchecked"'
    if any(each.looked for each in findings if each.invariant in checks.OF_RESULTS):
        return ""
    return "one process alone returned something" if digests else "the ranks returned nothing"


def _backend(scenario: Scenario) -> str:
    workload = scenario.workload
    if isinstance(workload, ReinforcementLearning):
        return workload.config.trainer.backend
    return scenario.job.backend


def _findings(raw: RawRun, bounds: Bounds) -> list[CheckResult]:
    """The results of the checkers over each job, those of one checker in one."""
    found: dict[str, CheckResult] = {}
    for events, ops in zip(raw.jobs, raw.ops, strict=True):
        for each in examine(merge([events, ops]), bounds, (*CHECKERS, *checks.CHECKERS)):
            before = found.get(each.invariant)
            if before is not None:
                looked, violations = before.looked + each.looked, before.violations + each.violations
                each = CheckResult(each.invariant, each.meaning, looked, violations)
            found[each.invariant] = each
    return list(found.values())


def _lives(raw: RawRun) -> tuple[ProcessRecord, ...]:
    faults = {
        event.target_pid: event
        for each in raw.faults
        for event in each.injected
        if event.what in (*KILLED, "pause", "cut", "partition", "link-cut")
    }
    working = {event.pid for event in raw.events if isinstance(event, StepBegun | StepCommitted)}
    found = []
    for life in raw.lives:
        ended = life.ended or raw.ended
        if (fault := faults.get(life.pid)) is not None and fault.what in KILLED:
            ended = min(ended, fault.time)
        role = life.role if life.role != "rank" or life.pid in working else "spare"
        found.append(life.record(raw.began, ended, role, life.pid in faults))
    return tuple(found)


def _in_a_line(raw: RawRun) -> str:
    """Why a run failed: the error with the line that raised it, else the last output of the ranks."""
    why, *trace = raw.results.errors[0].splitlines()
    frames = _FRAME.findall("\n".join(trace))
    if frames:
        return f"{why} ({frames[-1][0]}:{frames[-1][1]})"
    printed = [line for line in [*trace, *raw.output.splitlines()] if line.strip()]
    return f"{why}; {printed[-1]}" if printed else why


def _links(raw: RawRun, names: Mapping[int, str]) -> tuple[LinkTraffic, ...]:
    """The traffic with the names of the processes."""
    return tuple(
        msgspec.structs.replace(
            each, source=names.get(int(each.source), each.source), target=names.get(int(each.target), each.target)
        )
        for each in raw.traffic
    )


def _configuration(scenario: Scenario) -> dict[str, str]:
    """The settings of the scenario that differ from the defaults, as text."""
    workload = msgspec.to_builtins(scenario.workload)
    job = msgspec.to_builtins(scenario.job)
    default = msgspec.to_builtins(JobSpec())
    shown = {f"workload.{name}": value for name, value in workload.items() if name not in ("kind",)}
    shown |= {f"job.{name}": value for name, value in job.items() if value != default[name] or name == "ranks"}
    return {name: str(value) for name, value in shown.items()} | {"cores": str(len(os.sched_getaffinity(0)))}
