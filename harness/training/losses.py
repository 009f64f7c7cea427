"""The processes that a run lost, as faults of its report: what each one cost, from the events alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from holdfast.ft.console.units import coarse_seconds
from holdfast.harness.report.model import FaultRecord, RecoveryStage
from holdfast.harness.training.run_facts import RunFacts


def lost_processes(facts: RunFacts) -> tuple[FaultRecord, ...]:
    """Each process that died, and each driver that another one took over from, by time.

    The stages count from the moment at which the driver, or the next one, saw the loss: another process in its place,
    and the next step. The note has the time by which that step was longer than the steps of the run are.
    """
    return tuple(sorted(_faults(facts), key=lambda fault: fault.at))


def _faults(facts: RunFacts) -> Iterator[FaultRecord]:
    for lost in facts.lost.values():
        others = [each for each in facts.started.values() if each.replaces == lost.name]
        placed = min((facts.ready.get(each.name, each.time) for each in others), default=None)
        yield _fault(facts, lost.time, f"{lost.role} lost: {lost.how}", lost.name, placed)
    drivers = [each for each in facts.started.values() if each.role == "driver"]
    for before, after in pairwise(drivers):
        yield _fault(facts, facts.ends.get(before.name, after.time), "driver lost", before.name, after.time)


def _fault(facts: RunFacts, at: float, title: str, target: str, placed: float | None) -> FaultRecord:
    steps = sorted(facts.steps.values(), key=lambda step: step.time)
    times = [step.time for step in steps]
    done = sum(time <= at for time in times)
    stages = [] if placed is None else [RecoveryStage("another in its place", max(0.0, placed - at))]
    note = ""
    if done < len(times):
        stages.append(RecoveryStage("next step", times[done] - at))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        if done and gaps:
            usual = median(gaps)
            more = max(0.0, times[done] - times[done - 1] - usual)
            note = f"The step took {coarse_seconds(more)} longer than the median of {coarse_seconds(usual)}."
    return FaultRecord(time=at, words=title, victims=(target,), step=done, stages=tuple(stages), note=note)
