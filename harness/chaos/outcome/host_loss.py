"""Measures what the loss of a host costs a run of reinforcement learning, by the events of its drivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.harness.chaos.outcome.record import HostLoss
from holdfast.harness.chaos.run.scenario_run import PlannedFault
from holdfast.harness.chaos.run.training_processes import TrainingRecord
from holdfast.rl.run.run_events import Activity, CallTakenOver, CopiesRestored, StepTrained

NOTE = "host-lost"


def host_losses(record: TrainingRecord, faults: Sequence[PlannedFault]) -> tuple[HostLoss, ...]:
    """What followed the loss of each host."""
    return tuple(
        _after(record, noted.time, frozenset(victim.label or victim.name for victim in noted.victims))
        for fault in faults
        for noted in fault.noted
        if noted.what == NOTE
    )


def _after(record: TrainingRecord, lost: float, processes: frozenset[str]) -> HostLoss:
    events = [event for driver in record.drivers for event in driver]
    steps = [event for event in events if isinstance(event, StepTrained)]
    epoch = max((event.epoch for event in steps if event.time <= lost), default=0)
    moved = [event for event in events if isinstance(event, CallTakenOver) and event.lost in processes]
    return HostLoss(
        processes=tuple(sorted(processes)),
        step=_first((event.time for event in steps if event.epoch > epoch), lost),
        answer=_first(
            (
                event.time + event.seconds
                for event in events
                if isinstance(event, Activity) and event.what == "generate" and event.time > lost
            ),
            lost,
        ),
        calls=len(moved),
        calls_answered=max((event.time - lost for event in moved), default=None),
        copies=_first((event.time for event in events if isinstance(event, CopiesRestored)), lost),
    )


def _first(times: Iterator[float], since: float) -> float | None:
    """The seconds from `since` to the first of the times that are later."""
    return min((time - since for time in times if time > since), default=None)
