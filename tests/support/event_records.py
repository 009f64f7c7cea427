"""Events for tests of what reads them."""

from __future__ import annotations

from typing import Any

from holdfast.ft.event_lines import event_of
from holdfast.ft.events import Event


def an_event(kind: str, process: str = "a", time: float = 1.0, pid: int = 1, **fields: Any) -> Event:
    """An event by the name of its kind; of epoch 1, if it has one and no other is given."""
    return event_of({"epoch": 1, **fields, "kind": kind, "time": time, "process": process, "pid": pid})
