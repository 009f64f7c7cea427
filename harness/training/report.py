"""Builds the report of a run from the events in its directory: chooses and words its facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from holdfast.ft.console.units import coarse_seconds, counted, reward_text
from holdfast.harness.report.model import FaultRecord, Figure, RecoveryStage, RunReport
from holdfast.harness.training.run_facts import RunFacts
from holdfast.rl.run.run_directory import RunDirectory

PROCESSOR = "Processor time of holdfast"
"""The label of the figure."""


def report_of(
    directory: Path,
    *,
    title: str,
    configuration: Sequence[tuple[str, str]] = (),
    repeat: Sequence[str] = (),
    steps: int = 0,
) -> RunReport:
    """The report of the run in `directory`, which shall have so many steps. Raises `CorruptData` for a damaged file."""
    facts = RunFacts.of(RunDirectory(directory).events())
    began = datetime.fromtimestamp((directory / "events.jsonl").stat().st_mtime - facts.seconds).astimezone()
    done = len(facts.steps)
    return RunReport(
        title=title,
        good=done >= steps,
        outcome="all steps done" if done >= steps else f"{done:,} of {counted(steps, 'step')} done",
        summary=_summary(facts),
        when=f"{began:%d %B %Y, %H:%M %Z}".strip().lstrip("0"),
        seconds=facts.seconds,
        figures=_figures(facts),
        learning=facts.learning(),
        lanes=facts.lanes(),
        spans=facts.spans(),
        faults=lost_processes(facts),
        configuration=tuple(configuration),
        repeat=tuple(repeat),
    )


def _summary(facts: RunFacts) -> str:
    steps = counted(len(facts.steps), "step")
    held_out = facts.held_out()
    learnt = f"{steps} were committed"
    if len(held_out) > 1:
        learnt += (
            f"; the held-out reward went from {reward_text(held_out[0].value)} to {reward_text(held_out[-1].value)}"
        )
    parts = [f"{learnt}."]
    if facts.lost:
        parts.append(f"On the way {counted(len(facts.lost), 'process', 'processes')} died, each replaced by another.")
    if facts.resumes:
        again = counted(facts.repeated, "step")
        without = f" after {coarse_seconds(facts.downtime)} without one" if facts.downtime else ""
        times = counted(len(facts.resumes), "time")
        parts.append(f"The driver was resumed {times}{without}, and {again} trained again.")
    if left_out := sum(not each.again for each in facts.failed):
        parts.append(f"{counted(left_out, 'failed episode')} left out.")
    if gone_on := sum(each.again for each in facts.failed):
        parts.append(f"{counted(gone_on, 'episode')} went on in another environment.")
    return " ".join(parts)


def _figures(facts: RunFacts) -> tuple[Figure, ...]:
    held_out = facts.held_out()
    best = max((point.value for point in held_out), default=None)
    missing = [step for step in range(max(facts.steps, default=-1) + 1) if step not in facts.steps]
    figures = []
    if held_out and best is not None:
        words = f"at the end; best {reward_text(best)} of {counted(len(held_out), 'evaluation')}"
        figures.append(Figure("Held-out reward", reward_text(held_out[-1].value), words, "good"))
    figures.append(
        Figure("Steps lost", str(len(missing)), f"of {len(facts.steps):,} committed", "bad" if missing else "good")
    )
    tokens = sum(step.tokens for step in facts.steps.values())
    begun = min((step.time for step in facts.steps.values()), default=0.0)
    if facts.seconds > begun:
        words = f"drawn by the policy, from the first step on; {tokens:,} in all"
        figures.append(Figure("Tokens a second", f"{tokens / (facts.seconds - begun):,.0f}", words))
    if begun:
        figures.append(Figure("First step after", coarse_seconds(begun), "imports and the start of all processes"))
    if facts.drivers > 1:
        share = facts.downtime / facts.seconds if facts.seconds else 0.0
        words = f"without a driver, {share:.0%} of the run; {counted(facts.drivers, 'driver')}"
        figures.append(Figure("Downtime", coarse_seconds(facts.downtime), words))
    behind = [each for step in facts.steps.values() for each in step.staleness]
    if behind:
        figures.append(
            Figure("Staleness", f"{sum(behind) / len(behind):.2f}", f"versions on average, at most {max(behind)}")
        )
    if facts.served:
        times = [each.seconds for each in facts.served]
        figures.append(
            Figure(
                "Weights served after",
                coarse_seconds(median(times)),
                f"median; at most {coarse_seconds(max(times))}",
            )
        )
    model = facts.model_share()
    if model is not None:
        figures.append(Figure(PROCESSOR, f"{1 - model:.1%}", _processor_note(facts)))
    return tuple(figures)


def _processor_note(facts: RunFacts) -> str:
    """What the share of the processor time that is not the model's is a share of, in words."""
    return (
        f"of all threads from step {facts.steady_from} on; the model had the rest: forward and backward (with the "
        "collectives of sharded trainers), generate, optimizer"
    )


def processor_line(report: RunReport) -> str:
    """The processor time of holdfast in a run, as a line; empty if it is not known."""
    found = next((each for each in report.figures if each.label == PROCESSOR), None)
    return f"processor time of holdfast: {found.value} {found.note}" if found else ""


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
