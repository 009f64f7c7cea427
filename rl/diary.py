"""What a worker writes into the job's event logs about its work, so that a run can be read afterwards."""

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
        """Note, once it is done, how long the `with` block took: an event `did(activity, step, seconds)`.

        `step` is the step that it is for, or the version of the weights. What ends with an error is not noted.
        """
        began = time.monotonic()
        yield
        self._log.emit("did", activity=activity, step=step, seconds=time.monotonic() - began)

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Note that something happened, now. Also what a weight store takes for an observer."""
        self._log.emit(kind, **fields)

    def close(self) -> None:
        """Idempotent."""
        self._log.close()

    def __enter__(self) -> Diary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
