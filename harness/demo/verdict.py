"""Judges whether a run met its goals, and says why not."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from holdfast.ft.console.units import counted
from holdfast.harness.demo.faults import WorkerKilled
from holdfast.harness.demo.plan import DemoPlan
from holdfast.harness.demo.record import DemoFault, DemoRun, Evaluation, RunOutcome, Victim
from holdfast.harness.demo.recorder import RunRecorder
from holdfast.harness.demo.recovery import complete
from holdfast.harness.invariants import CheckResult, Event
from holdfast.rl.happenings import WorkerLost

AVERAGED = 3
"""How many of the last evaluations the final rate averages: single ones are jagged."""

RISE = 0.25
"""How much the held-out exact match must rise during reinforcement, in a run that is long enough."""


def rates(evaluations: Sequence[Evaluation]) -> tuple[float, float]:
    """The held-out exact match after the warm-up, and at the end."""
    ordered = sorted(evaluations, key=lambda each: each.version)
    last = ordered[1:][-AVERAGED:] or ordered
    return ordered[0].exact_match, sum(each.exact_match for each in last) / len(last)


def lost_steps(steps: int, events: Sequence[Event]) -> int:
    """How many of the run's steps no process committed."""
    committed = {event.integer("step") for event in events if event.kind == "committed"}
    return steps - len(committed & set(range(steps)))


def lost_versions(steps: int, recorder: RunRecorder, events: Sequence[Event], digest: str) -> int:
    """How many versions of the weights were never published, were lost later, or are wrong.

    The last version must have `digest`, that of the trainers at the end.
    """
    lost = {event.integer("version") for event in events if event.kind == "lost"}
    return steps - recorder.version + len(lost) + (recorder.stored.get(steps) != digest)


def judge(
    plan: DemoPlan,
    recorder: RunRecorder,
    events: Sequence[Event],
    found: Sequence[CheckResult],
    faults: Sequence[DemoFault],
    pending: Collection[Victim],
    digest: str,
) -> RunOutcome:
    """The verdict on a run. `digest` is that of the trainers' final weights."""
    before, after = rates(recorder.evaluations)
    steps = lost_steps(plan.recipe.steps, events)
    versions = lost_versions(plan.recipe.steps, recorder, events, digest)
    failures = []
    if not plan.too_short and after < before + RISE:
        failures.append(f"held-out exact match went from {before:.1%} to {after:.1%}: it had to rise by {RISE:.0%}")
    if steps:
        failures.append(f"lost: {counted(steps, 'step')}")
    if versions:
        failures.append(f"lost: {counted(versions, 'version')} of the weights")
    failures += [f"the {victim} was not struck" for victim in sorted(pending)]
    failures += [
        f"the recovery from the death of {fault.process} is not complete" for fault in faults if not complete(fault)
    ]
    failures += [
        f"{violation.invariant}: {violation.process}: {violation.message}"
        for finding in found
        for violation in finding.violations
    ]
    victims = {each.process for each in recorder.happenings if isinstance(each, WorkerKilled)}
    failures += [
        f"{each.name} was lost though nobody struck it: {each.how}"
        for each in recorder.happenings
        if isinstance(each, WorkerLost) and each.name not in victims
    ]
    return RunOutcome(recorder.untrained, before, after, digest, None, steps, versions, plan.too_short, tuple(failures))


def verified(run: DemoRun, again: DemoRun) -> DemoRun:
    """`run` with its final weights compared with those of `again`, a fault-free run of the same recipe."""
    outcome, other = run.outcome, again.outcome
    failures = outcome.failures + tuple(f"without faults: {failure}" for failure in other.failures)
    if other.digest != outcome.digest:
        failures += (f"the final weights are {outcome.digest}, and without faults {other.digest}",)
    return replace(run, outcome=replace(outcome, verified=other.digest, failures=failures))
