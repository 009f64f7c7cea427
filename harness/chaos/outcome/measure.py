"""Computes the figures of a run from its events: recoveries, speed, and what each process did when."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET

from holdfast.ft import events
from holdfast.harness.chaos.outcome.record import Percentiles, Speed
from holdfast.harness.chaos.run.scenario_run import KILLED, RawRun, RunFault
from holdfast.harness.invariants import Event
from holdfast.harness.recovery import recovery_of
from holdfast.harness.report.model import FaultRecord, RecoveryStage, Span

STAGES = ("detected", "rebuilt", "resumed")
"""The stages of a recovery: the first process knows of the fault; all have the next communicator, or the replica is
made again; the next step is committed.
"""


def speed(logged: Iterable[Event]) -> Speed:
    """How many steps were committed, and how many a second."""
    first: dict[int, float] = {}
    for event in logged:
        if isinstance(event, events.StepCommitted):
            first.setdefault(event.step, event.time)
    times = sorted(first.values())
    if len(times) < 2 or times[-1] <= times[0]:
        return Speed(steps=len(times), rate=0.0)
    return Speed(steps=len(times), rate=(len(times) - 1) / (times[-1] - times[0]))


def rebuilds(logged: Iterable[Event]) -> int:
    """How often a communicator replaced another: the epochs with a rebuild, but the first."""
    return max(0, len({event.epoch for event in logged if isinstance(event, events.CommunicatorBuilt)}) - 1)


def injected_faults(raw: RawRun) -> tuple[FaultRecord, ...]:
    """Every planned fault, in the order of the schedule, with the stages of its recovery."""
    moments = sorted(fault.time for fault in raw.faults if fault.time is not None)
    found = []
    for fault in raw.faults:
        stages: tuple[RecoveryStage, ...] = ()
        if fault.time is not None:
            after = next((moment for moment in moments if moment > fault.time), math.inf)
            stages = tuple(_stages(fault, raw.events, after))
        found.append(fault.record(raw.began, stages))
    return tuple(found)


def _stages(fault: RunFault, logged: Sequence[Event], until: float) -> Iterator[RecoveryStage]:
    """The stages between the fault and the next one; where two overlap, those of the recovery from both."""
    assert fault.time is not None
    commits = [event.time for event in logged if isinstance(event, events.StepCommitted)]
    last_commit = max(commits, default=fault.time)  # the end is full of farewells
    lost = {each.target for each in fault.injected if each.what in KILLED and each.target is not UNSET}
    found = recovery_of(logged, fault.time, lost, min(until, last_commit))
    rebuilt = max((found.rebuilt[each] for each in found.members if each in found.rebuilt), default=found.replaced)
    resumed = min(found.resumed.values(), default=None)
    for name, moment in zip(STAGES, (found.detected, rebuilt, resumed), strict=True):
        if moment is not None:
            yield RecoveryStage(name, moment - fault.time)


def percentiles(found: Iterable[FaultRecord]) -> dict[str, Percentiles]:
    """Percentiles of each stage over the faults with a recovery; "undisturbed": of the others, to the next step."""
    seconds: dict[str, list[float]] = {}
    for fault in found:
        recovered = any(stage.name == "detected" for stage in fault.stages)
        for stage in fault.stages:
            seconds.setdefault(stage.name if recovered else "undisturbed", []).append(stage.seconds)
    return {name: _percentiles(sorted(values)) for name, values in seconds.items()}


LEAST_VALUES = 5
"""Fewer values are shown one by one: a percentile of them would say no more."""


def _percentiles(values: Sequence[float]) -> Percentiles:
    """The median, and the other percentiles by the nearest-rank method."""

    def at(share: float) -> float | None:
        return values[max(0, math.ceil(share * len(values)) - 1)] if len(values) >= LEAST_VALUES else None

    few = tuple(values) if len(values) < LEAST_VALUES else ()
    return Percentiles(
        count=len(values), p50=statistics.median(values), p90=at(0.9), p99=at(0.99), worst=values[-1], values=few
    )


def spans(raw: RawRun, names: Mapping[int, str]) -> tuple[Span, ...]:
    """The spans of each process: steps, waits for commits, rebuilds, transfers of state. `names` by process id."""
    found = []
    open_at: dict[tuple[int, str], Event] = {}
    for event in raw.events:
        name = names.get(event.pid)
        if name is None:
            continue
        for activity, start, label in _closed(event, open_at):
            found.append(Span(name, activity, start - raw.began, event.time - raw.began, label))
    return tuple(found)


def _closed(event: Event, open_at: dict[tuple[int, str], Event]) -> Iterator[tuple[str, float, str]]:
    """The spans that end with an event."""
    pid, now = event.pid, event.time
    match event:
        case events.StepBegun():
            open_at[pid, "step"] = event
        case events.StepPrepared(step=step):
            if begun := open_at.pop((pid, "step"), None):
                yield "step", begun.time, str(step)
            open_at[pid, "commit"] = event
        case events.EpochRevoked():
            for name in ("step", "commit"):
                if isinstance(begun := open_at.pop((pid, name), None), events.StepBegun | events.StepPrepared):
                    yield name, begun.time, str(begun.step)
            open_at[pid, "rebuild"] = event
        case events.StepCommitted(step=step, how=how):
            if begun := open_at.pop((pid, "commit"), None):
                yield "commit", begun.time, str(step)
            elif how == "normal" and (pid, "step") not in open_at:
                if before := open_at.get((pid, "publish")):
                    yield "publish", before.time, str(step)
                open_at[pid, "publish"] = event
        case events.CommunicatorBuilt(epoch=epoch, seconds=seconds):
            revoked = open_at.pop((pid, "rebuild"), None)
            yield "rebuild", now - seconds if revoked is None else revoked.time, str(epoch)
        case events.StateReceived(step=step, seconds=seconds) if seconds:
            yield "sync", now - seconds, str(step)
        case events.VersionFetched(version=version):
            if before := open_at.get((pid, "fetch")):
                yield "fetch", before.time, str(version)
            open_at[pid, "fetch"] = event


POINTS = 400
"""The most points of a curve."""


def progress(raw: RawRun) -> tuple[tuple[float, int], ...]:
    """How many steps were committed at which time, thinned out but with all stalls."""
    found: list[tuple[float, int]] = []
    newest = -1
    for event in raw.events:
        if isinstance(event, events.StepCommitted) and event.step > newest:
            newest = event.step
            found.append((event.time - raw.began, newest + 1))
    if len(found) <= POINTS:
        return tuple(found)
    every = len(found) / POINTS
    wanted = {round(index * every) for index in range(POINTS)} | {len(found) - 1}
    gaps = sorted(range(1, len(found)), key=lambda i: found[i - 1][0] - found[i][0])[: POINTS // 4]
    wanted |= {place for gap in gaps for place in (gap - 1, gap)}
    return tuple(found[index] for index in sorted(wanted) if index < len(found))


MOST_SPANS = 6000
CLOSE_UPS = 12
"""The number of faults around which long runs keep every span."""


def thinned(found: tuple[Span, ...], faults: Sequence[FaultRecord], seconds: float) -> tuple[Span, ...]:
    """Spans for a picture of the whole run: long runs merge neighbours away from the first faults."""
    if len(found) <= MOST_SPANS:
        return found
    times = [fault.time for fault in faults if fault.time is not None][:CLOSE_UPS]
    close = [(time - 0.5, time + 3.5) for time in times]
    kept: list[Span] = []
    merged: dict[str, Span] = {}
    for span in found:
        if span.activity in ("rebuild", "sync") or any(low < span.end and span.start < high for low, high in close):
            kept.append(span)
            continue
        last = merged.get(span.process)
        if last is not None and span.start - last.end < seconds / 500 and span.end - last.start < seconds / 100:
            merged[span.process] = Span(span.process, "steps", last.start, max(last.end, span.end), last.label)
        else:
            if last is not None:
                kept.append(last)
            merged[span.process] = Span(span.process, "steps", span.start, span.end, span.label)
    return tuple(sorted((*kept, *merged.values()), key=lambda span: span.start))
