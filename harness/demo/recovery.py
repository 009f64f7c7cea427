"""Finds the stages of each recovery, with times, from the run's events and the event logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.harness.demo.faults import ReplicasRestored, WorkerKilled
from holdfast.harness.demo.record import DemoFault
from holdfast.harness.invariants import Event
from holdfast.harness.report.model import RecoveryStage
from holdfast.rl.happenings import Happening, UnitDone, WorkerLost, WorkerStarted

RECOVERED = {
    "trainer": ("detected", "rebuilt", "next step committed"),
    "generator": ("detected", "replaced", "unit redone"),
    "holder": ("detected", "replaced", "replicated again"),
}
"""The stages of a complete recovery, by victim."""


def injected_faults(began: float, happenings: Sequence[Happening], events: Sequence[Event]) -> tuple[DemoFault, ...]:
    """Every injected fault. `began` is on `time.monotonic()`."""
    return tuple(
        DemoFault(
            killed.victim,
            killed.process,
            killed.pid,
            killed.where,
            killed.step,
            killed.time - began,
            tuple(_stages(killed, happenings, events)),
        )
        for killed in happenings
        if isinstance(killed, WorkerKilled)
    )


def complete(fault: DemoFault) -> bool:
    """Whether the recovery from `fault` reached its last stage."""
    return tuple(stage.name for stage in fault.stages) == RECOVERED[fault.victim]


def _stages(killed: WorkerKilled, happenings: Sequence[Happening], events: Sequence[Event]) -> Iterable[RecoveryStage]:
    times = _of_trainer(killed, events) if killed.victim == "trainer" else _of_other(killed, happenings)
    for name, at in zip(RECOVERED[killed.victim], times, strict=True):
        if at is None:
            return
        yield RecoveryStage(name, at - killed.time)


def _of_trainer(killed: WorkerKilled, events: Sequence[Event]) -> tuple[float | None, ...]:
    after = [event for event in events if event.time > killed.time]
    detected = next((event.time for event in after if event.kind == "detected"), None)
    rebuilt = [event for event in after if event.kind == "rebuilt"]
    first = rebuilt[0].integer("epoch") if rebuilt else 0
    all_rebuilt = max((event.time for event in rebuilt if event.integer("epoch") == first), default=None)
    committed = next(
        (event.time for event in after if event.kind == "committed" and event.integer("step") >= killed.step), None
    )
    return detected, all_rebuilt, committed


def _of_other(killed: WorkerKilled, happenings: Sequence[Happening]) -> tuple[float | None, ...]:
    after = [each for each in happenings if each.time >= killed.time]
    lost = next((each for each in after if isinstance(each, WorkerLost) and each.name == killed.process), None)
    replaced = next(
        (each.time for each in after if isinstance(each, WorkerStarted) and each.replaces == killed.process), None
    )
    good: float | None = None
    if killed.victim == "holder":
        good = next((each.time for each in after if isinstance(each, ReplicasRestored)), None)
    elif lost is not None:
        redone = [each for each in after if isinstance(each, UnitDone) and each.unit in lost.requeued]
        good = redone[-1].time if len(redone) == len(lost.requeued) > 0 else None
    return lost.time if lost else None, replaced, good
