"""Builds the report of a demo run: chooses and words its facts."""

from __future__ import annotations

import shlex
from datetime import datetime

from holdfast.ft.console.units import coarse_seconds, counted
from holdfast.harness.demo.record import DemoFault, DemoRun, ProcessLife
from holdfast.harness.demo.verdict import AVERAGED
from holdfast.harness.report.model import (
    Curve,
    Figure,
    Point,
    ProcessRecord,
    ReportedFault,
    RunReport,
    Span,
)

_TITLES = {
    "trainer": "SIGKILL of a trainer",
    "generator": "SIGKILL of a generator",
    "holder": "SIGKILL of a holder of weights",
}
_ROLES = ("trainer", "generator", "holder")


def report_of(run: DemoRun) -> RunReport:
    """The whole report."""
    return RunReport(
        title=f"GRPO post-training over {run.backend}",
        good=run.outcome.passed,
        summary=_summary(run),
        when=_when(run.began),
        seconds=run.seconds,
        figures=_figures(run),
        curve=Curve(
            rewards=tuple(Point(step.step + 1, step.reward) for step in run.steps),
            evaluations=tuple(Point(one.version, one.exact_match) for one in run.evaluations),
            averaged=min(AVERAGED, max(1, len(run.evaluations) - 1)),
            untrained=run.outcome.untrained,
            warmup_steps=run.recipe.warmup_steps,
        ),
        lanes=_lanes(run),
        spans=tuple(Span(s.process, s.activity, s.start, s.end, f"{s.step}") for s in run.spans),
        faults=tuple(_fault(fault) for fault in run.blows),
        findings=run.findings,
        configuration=_configuration(run),
        repeat=_repeat(run),
        failures=run.outcome.failures,
    )


def _summary(run: DemoRun) -> str:
    outcome = run.outcome
    learnt = (
        f"A tiny Llama learnt to add three digits: held-out exact match went from {outcome.before:.1%} after the "
        f"supervised warm-up to {outcome.after:.1%}."
    )
    if outcome.too_short:
        learnt = "The run was too short to judge what was learnt."
    if not run.blows:
        return f"{learnt} Nothing was broken on the way."
    victims = [f"a {fault.victim}" for fault in run.blows]
    killed = " and ".join(filter(None, (", ".join(victims[:-1]), victims[-1])))
    verb = "was" if len(victims) == 1 else "were"
    lost = f"lost: {counted(outcome.steps_lost, 'step')} and {counted(outcome.versions_lost, 'version')} of the weights"
    if not (outcome.steps_lost or outcome.versions_lost):
        lost = "no step and no version of the weights was lost"
    return f"{learnt} On the way {killed} {verb} killed with SIGKILL; {lost}, and the job was never restarted."


def _when(began: str) -> str:
    return f"{datetime.fromisoformat(began):%d %B %Y, %H:%M %Z}".strip().lstrip("0")


def _figures(run: DemoRun) -> tuple[Figure, ...]:
    outcome = run.outcome
    figures = [
        Figure(
            "Held-out exact match",
            f"{outcome.before:.1%} → {outcome.after:.1%}",
            f"before and after {counted(len(run.steps), 'step')} of GRPO",
            "plain" if outcome.too_short else "good" if outcome.after > outcome.before else "bad",
        ),
        Figure(
            "Steps lost",
            f"{outcome.steps_lost}",
            f"of {len(run.steps):,} committed",
            "good" if outcome.steps_lost == 0 else "bad",
        ),
        Figure(
            "Versions lost",
            f"{outcome.versions_lost}",
            "of the published weights",
            "good" if outcome.versions_lost == 0 else "bad",
        ),
    ]
    rebuilds = [stage for fault in run.blows if fault.victim == "trainer" for stage in fault.stages]
    if rebuilds:
        figures.append(
            Figure("Trainer recovery", coarse_seconds(rebuilds[-1].seconds), f"SIGKILL to {rebuilds[-1].name}")
        )
    figures += [
        Figure(
            "Tokens a second",
            f"{run.tokens_per_second:,.0f}",
            f"generated and trained on; a step takes {coarse_seconds(run.step_seconds)}",
        )
    ]
    if outcome.verified is not None:
        same = outcome.verified == outcome.digest
        figures.append(
            Figure(
                "Final weights",
                "equal bits" if same else "other bits",
                "to those of a run without faults" if same else "than those of a run without faults",
                "good" if same else "bad",
            )
        )
    return tuple(figures)


def _lanes(run: DemoRun) -> tuple[ProcessRecord, ...]:
    killed = {fault.process: fault.time for fault in run.blows}
    known = sorted(
        run.lives, key=lambda life: (_ROLES.index(life.role) if life.role in _ROLES else len(_ROLES), life.started)
    )
    return tuple(_lane(life, killed, run.seconds) for life in known)


def _lane(life: ProcessLife, killed: dict[str, float], seconds: float) -> ProcessRecord:
    lost = life.ended is not None and life.how != ""
    return ProcessRecord(
        name=life.name,
        role=life.role,
        pid=life.pid,
        born=life.started,
        ended=killed.get(life.name, seconds if life.ended is None else life.ended),
        fate="killed" if life.name in killed else "lost" if lost else "finished",
        note=f"in place of {life.replaces}" if life.replaces else "",
    )


def _fault(fault: DemoFault) -> ReportedFault:
    return ReportedFault(
        time=fault.time,
        title=_TITLES[fault.victim],
        target=fault.process,
        steps=fault.step,
        stages=fault.stages,
        note=f"It was {fault.where}."
        if not fault.where.startswith("rank")
        else f"It was {fault.where}, in step {fault.step}.",
    )


def _configuration(run: DemoRun) -> tuple[tuple[str, str], ...]:
    recipe, crew = run.recipe, run.crew
    return (
        ("backend", run.backend),
        ("trainers", f"{crew.trainers}, and {crew.spares} hot spare{'' if crew.spares == 1 else 's'}"),
        ("generators", f"{crew.generators}"),
        ("holders of weights", f"{crew.holders}"),
        ("seed", f"{recipe.seed}"),
        ("steps", f"{recipe.steps:,}, after {recipe.warmup_steps} supervised"),
        ("samples a step", f"{recipe.step_samples} in {recipe.units} units"),
        ("generated with weights", f"{recipe.lag} step{'' if recipe.lag == 1 else 's'} old"),
        ("learning rate", f"{recipe.rate:g}"),
        ("entropy bonus", f"{recipe.entropy:g}"),
        ("start-up", coarse_seconds(run.setup_seconds)),
        ("final weights", run.outcome.digest[:16]),
    )


def _repeat(run: DemoRun) -> tuple[str, ...]:
    command = ["holdfast", "demo", "--backend", run.backend]
    command += ["--seed", f"{run.recipe.seed}", "--steps", f"{run.recipe.steps}"]
    faults = [] if run.blows else ["--no-faults"]
    return (shlex.join([*command, *faults]), shlex.join([*command, "--verify"]))
