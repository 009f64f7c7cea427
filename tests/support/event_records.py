"""Events for tests of what reads them."""

from __future__ import annotations

from typing import Any

from holdfast.ft.event_lines import event_of
from holdfast.ft.events import Event
from holdfast.rl.run.run_events import StepTrained


def an_event(kind: str, process: str = "a", time: float = 1.0, pid: int = 1, **fields: Any) -> Event:
    """An event by the name of its kind; of epoch 1, if it has one and no other is given."""
    return event_of({"epoch": 1, **fields, "kind": kind, "time": time, "process": process, "pid": pid})


def trained(step: int, time: float | None = None, **fields: Any) -> StepTrained:
    """The event of a step of a run, at the second of its number unless another time is given."""
    usual: dict[str, Any] = {"reward": 0.5, "loss": 0.1, "gradient_norm": 1.0, "tokens": 100, "staleness": (0, 1)}
    return StepTrained(step=step, time=float(step) if time is None else time, epoch=1, size=2, **usual | fields)
