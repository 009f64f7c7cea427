"""The flight recording of a session, its metrics if they are turned on, and what goes to OpenTelemetry."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from holdfast.comms.journal import Recorder
from holdfast.ft.telemetry import otel
from holdfast.ft.telemetry.event_log import EventLog
from holdfast.ft.telemetry.flight import FlightRecorder, open_recorder
from holdfast.ft.telemetry.metrics import PORT, Metrics, OpTally, ports


def asked_for(metrics: str | int | None) -> str:
    """The ports for metrics ("": no metrics), from the argument or HOLDFAST_METRICS_PORT. Raises ValueError."""
    asked = os.environ.get(PORT, "") if metrics is None else str(metrics)
    if asked:
        ports(asked)
    return asked


class Telemetry:
    """The recorder and the metrics of one process in a job."""

    def __init__(
        self, identity: str, job: str, events: EventLog, metrics: str, missed_heartbeats: Callable[[], int]
    ) -> None:
        """`metrics` is the result of `asked_for`. Raises `HoldfastError` if metrics cannot be served."""
        self._flight: FlightRecorder | None = open_recorder(identity, job)
        self.recorder: Recorder | None = self._flight
        self._metrics: Metrics | None = None
        self._end_export = otel.export(events, job)
        if metrics:
            self.recorder = tally = OpTally(self._flight)
            try:
                self._metrics = Metrics(metrics, job, events, tally, missed_heartbeats)
            except BaseException as error:
                self.close(error)
                raise

    def at_step(self, step: int) -> None:
        """Record ops as ops of `step` from now on."""
        if self._flight is not None:
            self._flight.at_step(step)

    def close(self, error: BaseException | None) -> None:
        """Close the recording and the metrics: the process leaves the job, in order or by `error`."""
        with contextlib.ExitStack() as closing:
            if self._flight is not None:
                closing.callback(self._flight.close, None if error is None else f"{type(error).__name__}: {error}")
            if self._metrics is not None:
                closing.callback(self._metrics.close)
            closing.callback(self._end_export)
