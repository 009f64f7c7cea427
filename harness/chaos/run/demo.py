"""Runs `holdfast demo` as the workload of a scenario, and records it as a chaos run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from holdfast.harness.chaos.faults.process import Kill
from holdfast.harness.chaos.judge.checks import same_weights
from holdfast.harness.chaos.judge.measure import percentiles, thinned
from holdfast.harness.chaos.judge.record import ChaosRun, InjectedFault, Speed
from holdfast.harness.chaos.scenario.planning import Planned
from holdfast.harness.chaos.scenario.scenario import Scenario
from holdfast.harness.chaos.scenario.workload import Demo
from holdfast.harness.demo.plan import DemoPlan, PlannedKill
from holdfast.harness.demo.record import DemoFault, DemoRun, Victim
from holdfast.harness.demo.recorder import RunRecorder
from holdfast.harness.demo.run import DemoRunner, RunSetup
from holdfast.harness.report.model import ProcessRecord, RecoveryStage, Span
from holdfast.rl.learning.recipe import Recipe

STAGES = {
    "rebuilt": "rebuilt",
    "replaced": "rebuilt",
    "next step committed": "resumed",
    "unit redone": "resumed",
    "replicated again": "resumed",
}
"""The demo's names of stages -> those of all chaos runs."""


class StepCounter:
    """A display that only counts steps."""

    def __init__(self, total: int, watch: Callable[[int, int], None]) -> None:
        self._total, self._watch = total, watch

    def refresh(self, recorder: RunRecorder) -> None:
        self._watch(len(recorder.steps), self._total)

    def close(self, recorder: RunRecorder) -> None:
        self.refresh(recorder)


def plan_of(scenario: Scenario, planned: Sequence[Planned]) -> DemoPlan:
    """The demo's plan. Raises ValueError for a fault that the demo does not support."""
    workload = scenario.workload
    assert isinstance(workload, Demo)
    kills: dict[Victim, PlannedKill] = {}
    for each in planned:
        if not isinstance(each.what, Kill) or each.when.step is None:
            raise ValueError('the demo\'s faults are kills at a step: type = "kill", at.step or at.random')
        for name in each.what.names:
            if name not in get_args(Victim) or name in kills:
                raise ValueError(f"the demo has one kill each of {', '.join(get_args(Victim))}; this is {name!r}")
            victim: Victim = name  # type: ignore[assignment]
            kills[victim] = PlannedKill(victim, each.when.step)
    recipe = Recipe(seed=workload.seed, steps=workload.steps)
    return DemoPlan(recipe=recipe, backend=scenario.job.backend, kills=tuple(kills.values()), timeout=scenario.limit)


def play(plan: DemoPlan, watch: Callable[[int, int], None]) -> DemoRun:
    """Run the demo once. Raises the errors of `DemoRunner.run`."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as directory:
        setup = RunSetup.prepare(plan, Path(directory), time.monotonic())
        return DemoRunner(plan, setup, StepCounter(plan.recipe.steps, watch)).run()


def judged(
    scenario: Scenario,
    seed: int,
    source: str,
    repeat: str,
    planned: Sequence[Planned],
    run: DemoRun,
    quiet: DemoRun | None,
) -> ChaosRun:
    """A demo run as a chaos run; `quiet` is the same run without faults."""
    faults = tuple(_injected(number, fault, planned) for number, fault in enumerate(run.blows, start=1))
    reference = "" if quiet is None else quiet.outcome.digest
    weights = same_weights({"trainers": run.outcome.digest}, reference)
    failures = [*run.outcome.failures]
    failures += [violation.message for violation in weights.violations]
    spans = tuple(Span(each.process, each.activity, each.start, each.end, str(each.step)) for each in run.spans)
    return ChaosRun(
        name=scenario.name,
        title=scenario.title,
        summary=scenario.summary.strip(),
        source=source,
        seed=seed,
        began=run.began,
        seconds=run.seconds,
        workload="demo",
        backend=run.backend,
        expected=scenario.expect.verdict,
        passed=not failures,
        failures=tuple(failures),
        violated=tuple(finding.invariant for finding in (*run.findings, weights) if finding.violations),
        strikes=faults,
        lives=_lives(run),
        spans=thinned(spans, faults, run.seconds),
        findings=(*run.findings, weights),
        percentiles=percentiles(faults),
        speed=_speed(run),
        reference=None if quiet is None else _speed(quiet),
        digest=run.outcome.digest,
        reference_digest=reference,
        rebuilds=max((step.epoch for step in run.steps), default=0)
        - min((step.epoch for step in run.steps), default=0),
        ranks=run.steps[-1].ranks if run.steps else 0,
        progress=tuple((step.time, step.step + 1) for step in run.steps),
        configuration={"workload.steps": str(run.recipe.steps), "workload.seed": str(run.recipe.seed)},
        repeat=repeat,
    )


def _injected(number: int, fault: DemoFault, planned: Sequence[Planned]) -> InjectedFault:
    stages = tuple(RecoveryStage(STAGES.get(stage.name, stage.name), stage.seconds) for stage in fault.stages)
    when = next((each.when.words() for each in planned if fault.victim in getattr(each.what, "names", ())), "")
    return InjectedFault(
        number=number,
        type="kill",
        words=f"SIGKILL: the {fault.victim} ({fault.where})",
        when=when,
        time=fault.time,
        healed=None,
        victims=(fault.process,),
        step=fault.step,
        stages=stages,
    )


def _lives(run: DemoRun) -> tuple[ProcessRecord, ...]:
    killed = {fault.process: fault.time for fault in run.blows}
    return tuple(
        ProcessRecord(
            name=life.name,
            role=life.role,
            pid=life.pid,
            born=life.started,
            ended=killed.get(life.name, run.seconds if life.ended is None else life.ended),
            fate="killed" if life.name in killed else "lost" if life.ended is not None and life.how else "finished",
            note=f"in place of {life.replaces}" if life.replaces else "",
        )
        for life in run.lives
    )


def _speed(run: DemoRun) -> Speed:
    times = [step.time for step in run.steps]
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
    return Speed(steps=len(times), rate=rate)
