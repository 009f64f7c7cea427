"""Reads the activities of every process from the event logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.harness.demo.record import StepSpan
from holdfast.harness.invariants import Event
from holdfast.rl.roles.trainer import REDUCTION


def spans(began: float, events: Iterable[Event], names: Mapping[int, str]) -> tuple[StepSpan, ...]:
    """The activities of workers, their reductions (also interrupted ones), and their rebuilds.

    `names` are those of the workers by pid: events of ft have the names of members. `began` is on `time.monotonic()`.
    """
    found = []
    for event in events:
        if event.kind == "op" and event.text("op") == REDUCTION:
            activity, step = "reduce", event.integer("step")
        elif event.kind == "did":
            activity, step = event.text("activity"), event.integer("step")
        elif event.kind == "rebuilt":
            activity, step = "rebuild", event.integer("epoch")
        else:
            continue
        end = event.time - began
        name = names.get(event.pid, event.process)
        found.append(StepSpan(name, activity, end - event.number("seconds"), end, step))
    return tuple(found)
