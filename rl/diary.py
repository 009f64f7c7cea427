"""The events of a worker's own work in the job's event logs, to analyse a run afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from holdfast.ft.telemetry.event_log import EventLog

Activity = Literal["generate", "evaluate", "fetch", "train", "update", "publish"]


class Diary:
    """The events of one worker, as lines of `<worker>.jsonl` in the job's log directory, if it has one."""

    def __init__(self, worker: str) -> None:
        self._log = EventLog(worker)

    @contextmanager
    def doing(self, activity: Activity, step: int) -> Iterator[None]:
        """Emit an event `did(activity, step, seconds)` at the end of the `with` block, with its duration.

        `step` is the step of the activity, or the version of the weights. A block that raises emits no event.
        """
        began = time.monotonic()
        yield
        self._log.emit("did", activity=activity, step=step, seconds=time.monotonic() - began)

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Emit an event with the current time. Also usable as the `observe` of a weight store."""
        self._log.emit(kind, **fields)

    def close(self) -> None:
        """Close the event log. Idempotent."""
        self._log.close()

    def __enter__(self) -> Diary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
