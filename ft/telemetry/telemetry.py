"""What a session leaves behind for those who watch it: a flight recording, and metrics if they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.comms.journal import Recorder
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight import FlightRecorder, open_recorder
from holdfast.ft.telemetry.metrics import PORT, Metrics, OpTally, ports


def asked_for(metrics: str | int | None) -> str:
    """The ports that metrics are to be served on ("": none), from an argument or the environment. Raises ValueError."""
    asked = os.environ.get(PORT, "") if metrics is None else str(metrics)
    if asked:
        ports(asked)
    return asked


class Telemetry:
    """The recorder and the metrics of one process in a job."""

    def __init__(
        self, identity: str, job: str, events: EventLog, metrics: str, missed_heartbeats: Callable[[], int]
    ) -> None:
        """`metrics` is what `asked_for` gave. Raises `HoldfastError` if they cannot be served."""
        self._flight: FlightRecorder | None = open_recorder(identity, job)
        self.recorder: Recorder | None = self._flight
        self._metrics: Metrics | None = None
        if metrics:
            self.recorder = tally = OpTally(self._flight)
            self._metrics = Metrics(metrics, job, events, tally, missed_heartbeats)

    def at_step(self, step: int) -> None:
        """Ops belong to `step` from now on."""
        if self._flight is not None:
            self._flight.at_step(step)

    def close(self, error: BaseException | None) -> None:
        """The process leaves the job, in order or by `error`."""
        if self._metrics is not None:
            self._metrics.close()
        if self._flight is not None:
            self._flight.close(None if error is None else f"{type(error).__name__}: {error}")
